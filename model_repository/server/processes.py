"""The processes below one of ours, from /proc: mpirun gives each rank a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_STUB = "triton_python_backend_stub"
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=0", b"PMIX_RANK=0")
# 1 is PR_SET_PDEATHSIG. The parent may have gone before it was set.
_PARENT_DEATH_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Process(NamedTuple):
    """`started` in clock ticks since boot tells a process from a later one with the same number."""

    pid: int
    parent: int
    started: int
    zombie: bool = False

    @property
    def alive(self) -> bool:
        """A process that has ended stays a zombie until its parent waits for it."""
        now = _read(self.pid)
        return now is not None and now.started == self.started and not now.zombie


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """`command` for Popen, which gets SIGTERM when the thread that starts it ends, also by SIGKILL.

    A `preexec_fn` would do the same in a fork of this process, and gRPC's fork handlers have left streams hanging.
    """
    return [sys.executable, "-ISc", _PARENT_DEATH_WRAPPER, str(os.getpid()), *command]


def descendants(pid: int) -> list[Process]:
    """All processes below `pid`, parents first."""
    found: list[Process] = []
    everything = [process for process in map(_read, _numbers()) if process is not None]
    parents = {pid}
    while parents:
        level = [process for process in everything if process.parent in parents]
        found += level
        parents = {process.pid for process in level}
    return found


def rank_zero(pid: int, program: str) -> int | None:
    """The process of MPI rank 0 that runs `program` below mpirun `pid`; None when there is none (any more)."""
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            root = Path("/proc", str(process.pid))
            named = (root / "cmdline").read_bytes().split(b"\0")[0] == program.encode()
            variables = (root / "environ").read_bytes().split(b"\0")
            if named and any(variable in variables for variable in _RANK_VARIABLES):
                return process.pid
    return None


def model_processes(pid: int) -> dict[str, list[Process]]:
    """The processes in which the tritonserver (or mpirun) `pid` runs Python models, by Triton model."""
    found: dict[str, list[Process]] = {}
    for process in descendants(pid):
        with contextlib.suppress(OSError, IndexError):
            program, script = Path("/proc", str(process.pid), "cmdline").read_bytes().decode().split("\0")[:2]
            if Path(program).name == _STUB:
                # REPOSITORY/MODEL/VERSION/model.py
                found.setdefault(Path(script).parents[1].name, []).append(process)
    return found


def kill_survivors(processes: list[Process]) -> None:
    """SIGKILL to those that are still the same process."""
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def _numbers() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int) -> Process | None:
    try:
        # the second field is the program's name in brackets and may hold anything
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[1]), int(fields[19]), fields[0] == "Z")
