"""The processes below a tritonserver or its mpirun.

The processes are MPI ranks, the stubs that run Python models, and workers of TensorRT-LLM.
"""

import contextlib
from collections import Counter
from pathlib import Path

from llmops.process import Process, descendants

#: Seconds for which a server may outlive the processes of a model that did not load. Such a server
#: normally ends by itself within that time.
LOSS_GRACE = 10.0
_STUB = "triton_python_backend_stub"
#: The module that a worker of TensorRT-LLM's LLM API runs. Workers of NVIDIA's backend are not
#: watched, because mpirun ends the server when one of them ends.
_WORKER_MODULE = "mpi4py.futures.server"
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=0", b"PMIX_RANK=0")


def rank_zero(pid: int, program: str) -> int | None:
    """Return the process id of MPI rank 0, or None if that process has ended.

    Rank 0 runs `program` below the mpirun with process id `pid`.
    """
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            folder = Path("/proc", str(process.pid))
            command = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            if command[0] == program.encode() and any(variable in variables for variable in _RANK_VARIABLES):
                return process.pid
    return None


class LoadWatch:
    """A detector of a model that loses a process, or whose worker fails, while it loads.

    TensorRT-LLM 1.2 waits forever in both cases, as reported in NVIDIA/TensorRT-LLM #17578 and
    #16342. (Open MPI 4.1 ends all workers when one is killed.) Every release waits forever for
    workers that did not start, as reported in ai-dynamo/dynamo #15060.
    """

    def __init__(self) -> None:
        self._most: Counter[str] = Counter()
        self._lost_since: float | None = None

    def find_lost(self, pid: int, now: float, failure: str) -> str:
        """Return a loss that the server `pid` has survived for LOSS_GRACE, or an empty text.

        The loss is the name of the model whose processes are gone, or otherwise the `failure` of
        its workers.
        """
        present = Counter({model: len(group) for model, group in model_processes(pid).items()})
        self._most |= present
        lost = next(iter(self._most - present), failure)
        if not lost:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since > LOSS_GRACE:
            return lost
        return ""


def model_processes(pid: int) -> dict[str, list[Process]]:
    """Return the processes that run Python models below process `pid`, by Triton model.

    The processes are the models' stubs, and the workers that TensorRT-LLM's LLM API spawns below a
    stub. `pid` is the process id of a tritonserver or mpirun.
    """
    found: dict[str, list[Process]] = {}
    models: dict[int, str] = {}
    for process in descendants(pid):
        with contextlib.suppress(OSError, IndexError):
            arguments = Path("/proc", str(process.pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
            model, is_stub = models.get(process.parent_pid, ""), Path(arguments[0]).name == _STUB
            if is_stub:
                # REPOSITORY/MODEL/VERSION/model.py
                model = Path(arguments[1]).parents[1].name
            models[process.pid] = model
            if is_stub or (model and _WORKER_MODULE in arguments):
                found.setdefault(model, []).append(process)
    return found
