"""The processes below a tritonserver or its mpirun.

These are MPI ranks, and the stubs that run Python models.
"""

import contextlib
from pathlib import Path

from llmops.process import Process, descendants

_STUB = "triton_python_backend_stub"
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=0", b"PMIX_RANK=0")


def rank_zero(pid: int, program: str) -> int | None:
    """Return the process id of MPI rank 0, or None if the process has ended.

    Rank 0 runs `program` below mpirun `pid`.
    """
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            folder = Path("/proc", str(process.pid))
            command = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            if command[0] == program.encode() and any(variable in variables for variable in _RANK_VARIABLES):
                return process.pid
    return None


def model_processes(pid: int) -> dict[str, list[Process]]:
    """Return the processes that run Python models, by Triton model.

    The processes belong to the tritonserver or mpirun `pid`.
    """
    found: dict[str, list[Process]] = {}
    for process in descendants(pid):
        with contextlib.suppress(OSError, IndexError):
            program, script = Path("/proc", str(process.pid), "cmdline").read_bytes().decode().split("\0")[:2]
            if Path(program).name == _STUB:
                # REPOSITORY/MODEL/VERSION/model.py
                found.setdefault(Path(script).parents[1].name, []).append(process)
    return found
