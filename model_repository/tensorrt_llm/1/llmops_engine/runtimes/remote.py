"""A runtime that generates in separate worker processes.

There is one process per GPU under mpirun, or one under the Python that has TensorRT-LLM.

Triton's Python backend of the nvidia-pytriton wheel cannot read string tensors with numpy 2, and
TensorRT-LLM 1.3 needs numpy 2, so Triton and TensorRT-LLM run under different Pythons. The executor
of TensorRT engines needs one MPI rank per GPU, and the first rank returns responses
(NVIDIA/TensorRT-LLM examples/bindings/executor/README.md, "Multi-GPU Example"). One message per
step crosses a Unix socket. When a process ends, the engine is dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llmops_process import stop_child

from ..engine_runtime import DeadEngineError, EngineRuntime, EngineStats, KvCacheEvent, StepOutput
from ..request import RuntimeRequest

#: Environment variable with the path of the Python that has TensorRT-LLM. It is set if Triton's
#: Python backend runs another Python.
PYTHON_VARIABLE = "LLMOPS_TRTLLM_PYTHON"
#: Names of files in the folder that the runtime shares with its workers: the options, the socket,
#: and the error of a rank that cannot load its part.
OPTIONS, SOCKET, LOAD_ERROR = "options.json", "socket", "load-error"
#: Maximum seconds that a step waits for the worker's next message. Bounds the delay of new requests
#: and cancellations.
_STEP_WAIT = 0.05
#: Seconds after which a worker that does not end by itself is killed. An engine frees its memory
#: within seconds.
_CLOSE_TIMEOUT = 30.0
#: Seconds between two checks whether a worker that has not connected yet still runs: short compared
#: with the time in which an engine loads.
_START_INTERVAL = 0.2


class RemoteRuntime(EngineRuntime):
    """An engine that runs in separate worker processes.

    Raises:
        ValueError: A worker did not start. The message is the worker's error.
    """

    def __init__(self, python: str, options: Any, module: str, ranks: int = 1) -> None:
        """Start the workers and wait until they have loaded the engine.

        Args:
            python: The path of the Python that runs the workers.
            options: A dataclass with the options that the function `start` of `module` takes.
            module: The name of a module in this package, such as "executor".
            ranks: The number of workers.
        """
        folder = Path(tempfile.mkdtemp(prefix="llmops-engine-"))
        try:
            (folder / OPTIONS).write_text(json.dumps({"module": module, "options": asdict(options)}))
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / SOCKET))
                listener.listen(1)
                listener.settimeout(_START_INTERVAL)
                self._process = subprocess.Popen(_command(python, ranks, folder), env=_environment())
                self._connection = self._accept(listener)
            # all ranks load the engine together, so each rank has read its options when the first
            # connects
            self._receive()
        except DeadEngineError as dead:
            # the first rank that fails ends the others
            message = folder / LOAD_ERROR
            raise ValueError(message.read_text() if message.is_file() else str(dead)) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._running: set[int] = set()
        self._kv_events: list[KvCacheEvent] = []
        self._stats = EngineStats(max_requests=options.max_batch_size)
        threading.Thread(target=self._watch, name="trtllm-process", daemon=True).start()

    def _accept(self, listener: socket.socket) -> Connection:
        """Return the connection that the worker opens after it has read its options."""
        while True:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._dead() from None
                continue
            accepted.setblocking(True)
            return Connection(accepted.detach())

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        # send lists, because not every numpy version can unpickle the arrays of another version
        ids: Any = request.input_ids.reshape(-1).tolist()
        bias: Any = None if request.embedding_bias is None else request.embedding_bias.tobytes()
        self._running.add(key)
        self._send(("submit", key, replace(request, input_ids=ids, embedding_bias=bias), sequence))

    def cancel(self, key: int) -> None:
        if key in self._running:
            self._running.discard(key)
            self._send(("cancel", key))

    def has_work(self) -> bool:
        # also True if the process has ended, so that the next step raises DeadEngineError
        return bool(self._running) or self._process.poll() is not None

    def step(self) -> Iterable[StepOutput]:
        outputs: list[StepOutput] = []
        wait = _STEP_WAIT
        while self._poll(wait):
            outputs += self._unpack(self._receive())
            wait = 0.0
        self._running -= {output.key for output in outputs if output.finish}
        return outputs

    def _unpack(self, message: Any) -> list[StepOutput]:
        """Store the statistics and cache events of a message, and return its outputs."""
        outputs, stats, kv_events = message
        self._kv_events += [KvCacheEvent(*event) for event in kv_events]
        self._stats = EngineStats(*stats)
        return [StepOutput(*output) for output in outputs]

    def stats(self) -> EngineStats:
        return self._stats if self._running else self._stats._replace(active=0, scheduled=0, waiting=0, context=0)

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        # the library continues to report events while nothing runs
        while not self._running and self._poll(0.0):
            self._unpack(self._receive())
        kv_events, self._kv_events = self._kv_events, []
        return kv_events

    def close(self) -> None:
        """Close the connection, which ends the worker, and kill a worker that does not end."""
        self._connection.close()
        stop_child(self._process, _CLOSE_TIMEOUT)

    def _send(self, message: tuple[Any, ...]) -> None:
        """Send a message to the worker. Ignore a broken connection: the next step notices it."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def _poll(self, wait: float) -> bool:
        try:
            return self._connection.poll(wait)
        except OSError as error:
            raise self._dead() from error

    def _watch(self) -> None:
        """Wake the engine thread when the worker ends, so that an idle engine does not stay ready."""
        self._process.wait()
        self.wake()

    def _receive(self) -> Any:
        """Return the next message. Raise DeadEngineError with the worker's error or exit code."""
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        if kind == "dead":
            raise DeadEngineError(content)
        return content

    def _dead(self) -> DeadEngineError:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return DeadEngineError("its process no longer answers")
        return DeadEngineError(f"its process ended with code {code}")


def _command(python: str, ranks: int, folder: Path) -> list[str]:
    worker = [python, "-m", f"{__package__}.remote_worker", str(folder)]
    if ranks == 1:
        return worker
    # a rank that is bound to one core would be slow (executorImpl.cpp, initializeOrchestrator)
    return ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks), *worker]


def _environment() -> dict[str, str]:
    # PYTHONSAFEPATH keeps Python from importing modules of the folder in which the server started
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}
