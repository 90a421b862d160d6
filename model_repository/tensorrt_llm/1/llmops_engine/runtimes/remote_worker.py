"""The other side of RemoteRuntime: `python -m llmops_engine.runtimes.remote_worker FOLDER`, where TensorRT-LLM is."""

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

import llmops_contract as contract
import numpy as np

from ..engine_runtime import FAILED, DeadEngineError, EngineRuntime
from ..request import RequestRejectedError
from .remote import OPTIONS, REFUSAL, SOCKET

# how often new requests are looked for while the library works on others (s)
_STEP_WAIT = 0.005
# how often news of the KV cache is looked for while nothing runs (s)
_IDLE_WAIT = 0.1


def main(folder: Path) -> int:
    """Serve until the other side closes the connection, or until the first rank ends this one. Returns the exit status:
    with any but 0, mpirun ends the other ranks.
    """
    task = json.loads((folder / OPTIONS).read_text())
    module = importlib.import_module(f"{__package__}.{task['module']}")
    connection = None if _rank() else _connected(folder)
    try:
        runtime = module.start(task["options"])
    except Exception as error:  # noqa: BLE001 - whatever the library says is why the model does not load
        (folder / REFUSAL).write_text(str(error) or repr(error))
        return 1
    if connection is None:
        runtime.close()
        return 0
    runtime.step_wait = _STEP_WAIT
    connection.send(("ready", ""))
    try:
        told: tuple[Any, ...] = ()
        while True:
            told = _turn(connection, runtime, told)
    except DeadEngineError as dead:
        connection.send(("dead", str(dead)))
        return 1
    except (EOFError, OSError):
        runtime.close()
    return 0


def _rank() -> int:
    """Return this process's number under mpirun, as Open MPI and PMIx say it."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or 0)


def _connected(folder: Path) -> Connection:
    """Connect to the engine's model, which removes the folder from then on."""
    side = socket.socket(socket.AF_UNIX)
    side.connect(str(folder / SOCKET))
    return Connection(side.detach())


def _turn(connection: Connection, runtime: EngineRuntime, told: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take what is asked, run a step, and send its news.

    Statistics are sent when they differ from `told`, also while nothing runs: the library reports those of the last
    step after it. Returns the statistics that were sent last.
    """
    while connection.poll(0 if runtime.has_work() else _IDLE_WAIT):
        failed = _execute(runtime, *connection.recv())
        if failed:
            connection.send(("step", ([failed], tuple(runtime.stats()), [])))
    outputs = list(runtime.step()) if runtime.has_work() else []
    changes = [tuple(one) for one in runtime.take_kv_events()]
    stats = tuple(runtime.stats())
    if outputs or changes or stats != told:
        connection.send(("step", ([tuple(one) for one in outputs], stats, changes)))
    return stats


def _execute(runtime: EngineRuntime, action: str, key: int, *request: Any) -> tuple[Any, ...] | None:
    """Why a request cannot be started; None when it can."""
    if action == "cancel":
        runtime.cancel(key)
        return None
    asked, sequence = request
    try:
        ids, bias = np.array(asked.input_ids, dtype=np.int64), asked.embedding_bias
        bias = None if bias is None else np.frombuffer(bias, dtype=np.float32)
        runtime.submit(key, replace(asked, input_ids=ids, embedding_bias=bias), sequence)
    except RequestRejectedError as refusal:
        return (key, [], [], FAILED, str(refusal))
    except Exception as error:  # noqa: BLE001 - a request that the library chokes on must not end the others
        return (key, [], [], FAILED, f"{contract.INPUT_IDS}: {error}")
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
