"""Processes of this machine: tie a child to its parent, read it from /proc, and stop it.

Linux and the standard library only. `llmops repo` copies this file beside the engine model that
runs inside Triton, as `llmops_process.py`. Run as a script it starts a command that gets SIGTERM
when its parent ends:

    python process.py PARENT_PID COMMAND...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Seconds in which Triton's stub process ends by itself after its server is gone.
PARENT_DEATH_GRACE = 10.0

_PR_SET_PDEATHSIG = 1
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """A process as it was when it was read from /proc.

    `start_ticks`, in clock ticks since boot, tells a process from a later one with the same id.
    """

    pid: int
    parent_pid: int
    start_ticks: int
    is_zombie: bool
    cpu_seconds: float
    resident_bytes: int

    @property
    def is_alive(self) -> bool:
        """True if the process still runs.

        A process that has ended stays a zombie until its parent waits for it.
        """
        try:
            now = read_process(self.pid)
        except OSError:
            return False
        return now.start_ticks == self.start_ticks and not now.is_zombie


def read_process(pid: int) -> Process:
    """Return the process `pid`. Raise OSError if it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # the second field is the program's name in brackets and may hold anything
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
    """Return all processes below `pid`, parents first."""
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
    """Send SIGKILL to the processes that are still alive."""
    for process in processes:
        if process.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def stop_child(child: subprocess.Popen[bytes], timeout: float = 0.0) -> None:
    """Wait `timeout` seconds for a child to end by itself, kill it otherwise, and close its pipes."""
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

    Nothing is imported from the working directory, which may be a stranger's checkpoint.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Return `command` for Popen, wrapped to get SIGTERM when the starting thread ends.

    This also holds when SIGKILL ends the parent. A `preexec_fn` would do the same in a fork of this
    process, but gRPC's fork handlers have left streams hanging.
    """
    return [sys.executable, "-IS", os.path.abspath(__file__), str(os.getpid()), *command]


def end_with_parent(parent_pid: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends.

    Exit if the parent has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        sys.exit(1)


def kill_after_parent(grace: float = PARENT_DEATH_GRACE) -> None:
    """Start a thread that kills this process `grace` seconds after its parent has ended.

    A Triton stub that waits for a response of its server, for instance to a metric, waits forever
    when the server was killed, and keeps the engine's memory. PR_SET_PDEATHSIG does not help there:
    the thread of the server that starts a stub ends at once.
    """
    # Linux before 5.3 has no pidfd_open
    with contextlib.suppress(OSError):
        parent = os.pidfd_open(os.getppid())
        thread = threading.Thread(target=_kill_after, args=(parent, grace), name="parent-death", daemon=True)
        thread.start()


def _kill_after(parent: int, grace: float) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    # at once, because newer stubs end 0.3 s after their server, and workers of the LLM API, which are in
    # other sessions, would keep the engine's memory
    kill_survivors(descendants(os.getpid()))
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
