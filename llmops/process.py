"""Processes of this machine: limit one, tie it to its parent, read it from /proc, and stop it.

The module needs only Linux and Python's standard library. `llmops repo` copies the file beside the
engine model that runs inside Triton, as `llmops_process.py`. Run as a script, the module starts a
command that gets SIGTERM when its parent ends:

    python process.py PARENT_PID COMMAND...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Seconds that Triton's stub process gets to end by itself after its server has ended. A stub that
#: still runs after them hangs, and is killed.
PARENT_DEATH_GRACE = 10.0

_PR_SET_PDEATHSIG = 1
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """A snapshot of a process from /proc.

    Attributes:
        pid: The process id.
        parent_pid: The process id of the parent.
        start_ticks: The start in clock ticks since boot, which tells the process from a later one
            with the same id.
        is_zombie: True if the process had ended, and its parent had not waited for it.
        cpu_seconds: CPU time in user and system mode.
        resident_bytes: Resident memory in bytes.
    """

    pid: int
    parent_pid: int
    start_ticks: int
    is_zombie: bool
    cpu_seconds: float
    resident_bytes: int

    @property
    def is_alive(self) -> bool:
        """Return True if the process still runs now.

        A process that has ended is a zombie until its parent waits for it.
        """
        try:
            now = read_process(self.pid)
        except OSError:
            return False
        return now.start_ticks == self.start_ticks and not now.is_zombie


def read_process(pid: int) -> Process:
    """Return a snapshot of the process `pid`. Raise OSError if the process does not exist."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The second field is the program's name in brackets, which may contain spaces and brackets.
        fields = file.read().rpartition(b")")[2].split()
    return Process(
        pid=pid,
        parent_pid=int(fields[1]),
        start_ticks=int(fields[19]),
        is_zombie=fields[0] == b"Z",
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        resident_bytes=int(fields[21]) * _PAGE_SIZE,
    )


def descendants(pid: int) -> list[Process]:
    """Return all children of `pid` and their descendants, parents before children."""
    processes = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                processes.append(read_process(int(name)))
    found: list[Process] = []
    parents = {pid}
    while parents:
        level = [process for process in processes if process.parent_pid in parents]
        found += level
        parents = {process.pid for process in level}
    return found


def kill_survivors(processes: Iterable[Process]) -> None:
    """Send SIGKILL to each of `processes` that still runs."""
    for process in processes:
        if process.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def stop_child(child: subprocess.Popen[bytes], timeout: float = 0.0) -> None:
    """Wait for a child to end, kill the child after `timeout` seconds, and close its pipes."""
    try:
        if timeout:
            child.wait(timeout)
    except subprocess.TimeoutExpired:
        pass
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this installation.

    The command imports nothing from the working directory, which may contain an untrusted
    checkpoint.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Return `command` for Popen, wrapped to get SIGTERM when the starting thread ends.

    The signal also arrives when SIGKILL ends the parent. A `preexec_fn` would do the same in a fork
    of this process, but then gRPC's fork handlers sometimes leave streams hanging.
    """
    return [sys.executable, "-IS", os.path.abspath(__file__), str(os.getpid()), *command]


def end_with_parent(parent_pid: int, signal_number: int) -> None:
    """Ask the kernel to send this process a signal when its parent ends.

    Exit if the parent has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        sys.exit(1)


def limit_process(seconds: int, memory: int) -> None:
    """Limit the CPU seconds and bytes of memory of this process, and turn off its core dumps."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def kill_after_parent(grace: float = PARENT_DEATH_GRACE) -> None:
    """Start a thread that kills this process `grace` seconds after its parent has ended.

    A Triton stub that waits for a response of its server, for instance to a metric, waits forever
    when the server was killed, and keeps the engine's memory. PR_SET_PDEATHSIG does not help,
    because the signal follows the end of the server's thread that started the stub, and that thread
    ends at once.
    """
    # Linux before 5.3 has no pidfd_open.
    with contextlib.suppress(OSError):
        parent = os.pidfd_open(os.getppid())
        thread = threading.Thread(target=_kill_after, args=(parent, grace), name="parent-death", daemon=True)
        thread.start()


def _kill_after(parent: int, grace: float) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    # Kill the descendants at once: newer stubs end 0.3 s after their server, and then the workers
    # of the LLM API, which are in other sessions, would keep the engine's memory.
    kill_survivors(descendants(os.getpid()))
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
