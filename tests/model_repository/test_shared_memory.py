"""Shared memory of servers that are gone is removed; what another server, user or PID namespace uses is not."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmops.model_repository.server import shared_memory
from llmops.model_repository.server.shared_memory import SHM_DIR, SharedMemory, remove_stale_segments
from llmops.process import kill_survivors, read_process
from tests.support.model_code import version_folder
from tests.support.processes import as_user
from tests.support.waiting import wait_until

NOBODY = 65534
HOLD = """
import sys
from pathlib import Path
from llmops.model_repository.server.shared_memory import SharedMemory
memory = SharedMemory()
Path("/dev/shm", memory.prefix + "segment").write_text("live")
print(memory.prefix, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    held = SharedMemory()
    (SHM_DIR / f"{held.prefix}segment").write_text("live")
    yield held
    held.remove()


def left(prefix: str) -> list[str]:
    return sorted(path.name.removeprefix(prefix) for path in SHM_DIR.glob(f"{prefix}*"))


def holder(*before: str) -> tuple[subprocess.Popen[str], str]:
    """A process that holds a server's memory, and its prefix."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*before, sys.executable, "-c", HOLD], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_what_is_removed_leaves_nothing_and_a_second_time_does_nothing(memory: SharedMemory) -> None:
    assert left(memory.prefix) == ["lock", "segment"]
    memory.remove()
    memory.remove()
    assert left(memory.prefix) == []


def test_a_sweep_takes_what_a_killed_process_left_and_nothing_else(memory: SharedMemory) -> None:
    process, dead = holder()
    remove_stale_segments()
    assert left(dead) == ["lock", "segment"]
    process.kill()
    process.wait()
    remove_stale_segments()
    assert left(dead) == []
    assert left(memory.prefix) == ["lock", "segment"]


def test_a_process_that_inherited_the_memory_keeps_it(memory: SharedMemory) -> None:
    """The process tritonserver inherits the memory when `llmops serve` is killed."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(memory.lock,))
    os.close(memory.lock)
    memory.lock = -1
    remove_stale_segments()
    assert left(memory.prefix) == ["lock", "segment"]
    process.kill()
    process.wait()
    remove_stale_segments()
    assert left(memory.prefix) == []


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of /dev/shm: each start of a server, in other tests too, sweeps that one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setattr(shared_memory, "SHM_DIR", Path(folder))
        yield Path(folder)


def test_another_users_dead_segments_stop_nobody(own_folder: Path) -> None:
    """Neither an ordinary user who may not remove root's, nor root, who could remove others'."""

    def owners() -> list[int]:
        return sorted(path.stat().st_uid for path in own_folder.iterdir())

    def leave() -> None:
        """Leave shared memory behind like a server that was killed."""
        (own_folder / f"{SharedMemory().prefix}segment").write_text("dead")

    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    assert as_user(0, leave) == as_user(NOBODY, remove_stale_segments) == as_user(NOBODY, leave) == ""
    assert owners() == [0, 0, NOBODY, NOBODY]
    remove_stale_segments()
    assert owners() == [NOBODY, NOBODY]
    assert as_user(NOBODY, remove_stale_segments) == ""
    assert owners() == []


def unshared() -> list[str]:
    """Return the prefix of a command that runs in a PID namespace of its own.

    A container with --ipc=host has such a namespace.
    """
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here (unshare --pid)")
    return command


def test_another_pid_namespace_keeps_what_it_uses_and_takes_nothing(memory: SharedMemory) -> None:
    process, there = holder(*unshared())
    try:
        # its owner's number is another process here, or none
        remove_stale_segments()
        assert left(there) == ["lock", "segment"]
        code = "from llmops.model_repository.server.shared_memory import remove_stale_segments; remove_stale_segments()"
        subprocess.run([*unshared(), sys.executable, "-c", code], check=True)
        assert left(memory.prefix) == left(there) == ["lock", "segment"]
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: (remove_stale_segments(), left(there))[1] == [])


# -- An engine whose server was killed while it waited for it


STUB = """
import subprocess, threading
from llmops_process import kill_after_parent
kill_after_parent(3)
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("waits", worker.pid, flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
SERVER = """
import subprocess, sys, threading
# from a thread that is over, as Triton starts its stubs
def start():
    global stub
    stub = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
thread = threading.Thread(target=start)
thread.start(); thread.join()
print(stub.stdout.readline().strip(), stub.pid, flush=True)
stub.wait()
"""


def test_it_ends_after_its_server_with_its_own_workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(version_folder("tensorrt_llm")))
    server = subprocess.Popen([sys.executable, "-c", SERVER, STUB], stdout=subprocess.PIPE, text=True)
    said, worker_pid, pid = server.stdout.readline().split()
    assert said == "waits"
    stub, worker = os.pidfd_open(int(pid)), read_process(int(worker_pid))
    try:
        ended = select.poll()
        ended.register(stub, select.POLLIN)
        assert ended.poll(500) == []
        server.kill()
        server.wait()
        # its worker first: a stub of 26.07 ends by itself 0.3 s after its server (pb_stub.cc, main)
        wait_until(lambda: not worker.is_alive)
        assert ended.poll(0) == []
        assert ended.poll(60_000) != []
    finally:
        kill_survivors([worker])
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(stub, signal.SIGKILL)
        os.close(stub)
