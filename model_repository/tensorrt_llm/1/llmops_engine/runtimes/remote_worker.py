"""The other side of RemoteRuntime: `python -m llmops_engine.runtimes.remote_worker FD`, where TensorRT-LLM is."""

from __future__ import annotations

import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import llmops_contract as contract
import numpy as np

from ..request import Refused
from ..runtime import FAILED, EngineDead
from .trtllm import TrtllmOptions, TrtllmRuntime

# how often new requests are looked for while the library works on others (s)
_STEP_WAIT = 0.005
# how often news of the KV cache is looked for while nothing runs (s)
_IDLE_WAIT = 0.1


def main(descriptor: int) -> None:
    """Until the other side closes the connection."""
    connection = Connection(descriptor)
    try:
        runtime = TrtllmRuntime(TrtllmOptions(**connection.recv()))
    except Exception as error:  # noqa: BLE001 - whatever the library says is why the model does not load
        connection.send(("refused", str(error) or repr(error)))
        return
    runtime.step_wait = _STEP_WAIT
    connection.send(("ready", ""))
    try:
        told: tuple[Any, ...] = ()
        while True:
            told = _turn(connection, runtime, told)
    except EngineDead as dead:
        connection.send(("dead", str(dead)))
    except (EOFError, OSError):
        runtime.close()


def _turn(connection: Connection, runtime: TrtllmRuntime, told: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take what is asked, run a step, and send its news.

    Statistics are sent when they differ from `told`, also while nothing runs: the library reports those of the last
    step after it. Returns the statistics that were sent last.
    """
    while connection.poll(0 if runtime.has_work() else _IDLE_WAIT):
        failed = _obey(runtime, *connection.recv())
        if failed:
            connection.send(("step", ([failed], tuple(runtime.stats()), [])))
    outputs = list(runtime.step()) if runtime.has_work() else []
    changes = [tuple(one) for one in runtime.kv_changes()]
    stats = tuple(runtime.stats())
    if outputs or changes or stats != told:
        connection.send(("step", ([tuple(one) for one in outputs], stats, changes)))
    return stats


def _obey(runtime: TrtllmRuntime, action: str, key: int, *request: Any) -> tuple[Any, ...] | None:
    """Why a request cannot be started; None when it can."""
    if action == "cancel":
        runtime.cancel(key)
        return None
    asked, sequence = request
    try:
        runtime.submit(key, replace(asked, input_ids=np.array(asked.input_ids, dtype=np.int64)), sequence)
    except Refused as refusal:
        return (key, [], [], FAILED, str(refusal))
    except Exception as error:  # noqa: BLE001 - a request that the library chokes on must not end the others
        return (key, [], [], FAILED, f"{contract.INPUT_IDS}: {error}")
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
