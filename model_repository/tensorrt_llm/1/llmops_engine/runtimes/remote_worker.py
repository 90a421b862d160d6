"""The worker of RemoteRuntime, run by the Python that has TensorRT-LLM.

python -m llmops_engine.runtimes.remote_worker FOLDER
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..engine_runtime import ENGINE_FAILED, FAILED, DeadEngineError, EngineRuntime
from ..request import RequestRejectedError
from .remote import LOAD_ERROR, OPTIONS, SOCKET

#: Maximum seconds of a step, after which the worker checks for new requests.
_STEP_WAIT = 0.005
#: Maximum seconds that an idle worker waits for a message before it checks for KV-cache events.
_IDLE_WAIT = 0.1


def main(folder: Path) -> int:
    """Serve until the connection is closed, or until the first rank ends this one.

    Returns:
        The exit status. If it is not 0, mpirun ends the other ranks.
    """
    task = json.loads((folder / OPTIONS).read_text())
    module = importlib.import_module(f"{__package__}.{task['module']}")
    connection = None if _rank() else _connect(folder)
    try:
        runtime = module.start(task["options"])
    except Exception as error:  # noqa: BLE001 - the library's message is why the model does not load
        (folder / LOAD_ERROR).write_text(str(error) or repr(error))
        return 1
    if connection is None:
        runtime.close()
        return 0
    runtime.step_wait = _STEP_WAIT
    connection.send(("ready", ""))
    try:
        stats: tuple[Any, ...] = ()
        while True:
            stats = _iterate(connection, runtime, stats)
    except DeadEngineError as dead:
        connection.send(("dead", str(dead)))
        return 1
    except (EOFError, OSError):
        runtime.close()
    return 0


def _rank() -> int:
    """Return this process's rank under mpirun (Open MPI or PMIx), or 0."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or 0)


def _connect(folder: Path) -> Connection:
    """Connect to RemoteRuntime, which removes the folder once the engine is loaded."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(folder / SOCKET))
    return Connection(client.detach())


def _iterate(connection: Connection, runtime: EngineRuntime, last_stats: tuple[Any, ...]) -> tuple[Any, ...]:
    """Execute the messages that have arrived, run one step, and send the step's results.

    Statistics are sent when they differ from `last_stats`, even while nothing runs, because the
    library reports the last step's statistics only after that step.

    Returns:
        The current statistics.
    """
    while connection.poll(0 if runtime.has_work() else _IDLE_WAIT):
        failure = _execute(runtime, *connection.recv())
        if failure:
            connection.send(("step", ([failure], tuple(runtime.stats()), [])))
    outputs = list(runtime.step()) if runtime.has_work() else []
    kv_events = [tuple(event) for event in runtime.take_kv_events()]
    stats = tuple(runtime.stats())
    if outputs or kv_events or stats != last_stats:
        connection.send(("step", ([tuple(output) for output in outputs], stats, kv_events)))
    return stats


def _execute(runtime: EngineRuntime, action: str, key: int, *arguments: Any) -> tuple[Any, ...] | None:
    """Submit or cancel a sequence.

    Return the fields of a failed StepOutput if the sequence cannot be submitted, or None.
    """
    if action == "cancel":
        runtime.cancel(key)
        return None
    request, sequence = arguments
    try:
        ids, bias = np.array(request.input_ids, dtype=np.int64), request.embedding_bias
        bias = None if bias is None else np.frombuffer(bias, dtype=np.float32)
        runtime.submit(key, replace(request, input_ids=ids, embedding_bias=bias), sequence)
    except RequestRejectedError as rejection:
        return (key, [], [], FAILED, str(rejection))
    except Exception as error:  # noqa: BLE001 - a request that the library chokes on must not end the others
        return (key, [], [], FAILED, f"{ENGINE_FAILED}: {error}")
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
