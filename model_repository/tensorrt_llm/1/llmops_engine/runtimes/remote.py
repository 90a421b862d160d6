"""A runtime in processes of its own: one per GPU under mpirun, or one under the Python that has TensorRT-LLM.

Triton's Python backend of the nvidia-pytriton wheel cannot read string tensors with numpy 2, and TensorRT-LLM 1.3 wants
numpy 2: each gets its own Python. The executor of TensorRT engines wants one MPI rank per GPU, of which the first
answers (NVIDIA/TensorRT-LLM examples/bindings/executor/README.md, "Multi-GPU Example"). One message per step crosses a
Unix socket; a process that ends is a dead engine.
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

from ..engine_runtime import DeadEngineError, EngineRuntime, EngineStats, KvCacheEvent, StepOutput
from ..request import RuntimeRequest

# the Python that has TensorRT-LLM, where it is not the one that Triton's stub runs
PYTHON_VARIABLE = "LLMOPS_TRTLLM_PYTHON"
#: What the worker finds in its folder, and the sentence of a rank that cannot load its part.
OPTIONS, SOCKET, REFUSAL = "options.json", "socket", "refusal"
_STEP_WAIT, _CLOSE_WAIT = 0.05, 30.0
#: Seconds between two looks at a process that has not connected yet.
_START_WAIT = 0.2
# what mpirun finds of an mpirun or a scheduler around it, and would take for its own
_FOREIGN = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_LAUNCHED")


class RemoteRuntime(EngineRuntime):
    """An engine in processes of its own.

    Raises:
        ValueError: A worker does not start; the text is its own sentence.
    """

    def __init__(self, python: str, options: Any, module: str, ranks: int = 1) -> None:
        """`module` is the one beside this that has `start`, and `options` what that takes."""
        folder = Path(tempfile.mkdtemp(prefix="llmops-engine-"))
        try:
            (folder / OPTIONS).write_text(json.dumps({"module": module, "options": asdict(options)}))
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / SOCKET))
                listener.listen(1)
                listener.settimeout(_START_WAIT)
                self._process = subprocess.Popen(_command(python, ranks, folder), env=_environment(ranks))
                self._connection = self._accepted(listener)
            # the engine is loaded by all ranks together, so each has read its options by then
            self._receive()
        except DeadEngineError as dead:
            # whichever rank fails first takes the others along
            refusal = folder / REFUSAL
            raise ValueError(refusal.read_text() if refusal.is_file() else str(dead)) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._running: set[int] = set()
        self._changes: list[KvCacheEvent] = []
        self._stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, options.max_batch_size)
        threading.Thread(target=self._watch, name="trtllm-process", daemon=True).start()

    def _accepted(self, listener: socket.socket) -> Connection:
        """Return the connection that the worker makes once it has read its options."""
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
        # not every numpy version reads the arrays of another
        ids: Any = request.input_ids.reshape(-1).tolist()
        bias: Any = None if request.embedding_bias is None else request.embedding_bias.tobytes()
        self._running.add(key)
        self._send(("submit", key, replace(request, input_ids=ids, embedding_bias=bias), sequence))

    def cancel(self, key: int) -> None:
        if key in self._running:
            self._running.discard(key)
            self._send(("cancel", key))

    def has_work(self) -> bool:
        # the next step notices a process that has ended
        return bool(self._running) or self._process.poll() is not None

    def step(self) -> Iterable[StepOutput]:
        outputs: list[StepOutput] = []
        wait = _STEP_WAIT
        while self._poll(wait):
            outputs += self._take(self._receive())
            wait = 0.0
        self._running -= {one.key for one in outputs if one.finish}
        return outputs

    def _take(self, message: Any) -> list[StepOutput]:
        """Keep what a step says about the engine, and return what it says about sequences."""
        new, stats, changes = message
        self._changes += [KvCacheEvent(*one) for one in changes]
        self._stats = EngineStats(*stats)
        return [StepOutput(*one) for one in new]

    def stats(self) -> EngineStats:
        return self._stats if self._running else self._stats._replace(active=0, scheduled=0, waiting=0, context=0)

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        # the library goes on to report while nothing runs
        while not self._running and self._poll(0.0):
            self._take(self._receive())
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """The worker ends when its side of the connection is closed."""
        self._connection.close()
        try:
            self._process.wait(_CLOSE_WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: tuple[Any, ...]) -> None:
        """The next step notices a worker that is gone."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def _poll(self, wait: float) -> bool:
        try:
            return self._connection.poll(wait)
        except OSError as error:
            raise self._dead() from error

    def _watch(self) -> None:
        """An engine that dies while idle is not ready from then on, either."""
        self._process.wait()
        self.wake()

    def _receive(self) -> Any:
        """The next message. Raises DeadEngineError, with what the worker said last or how it ended."""
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
    # a rank that is bound to one core is slow (executorImpl.cpp, initializeOrchestrator)
    return ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks), *worker]


def _environment(ranks: int) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if ranks == 1 or not name.startswith(_FOREIGN)}
    return {**given, "PYTHONPATH": str(Path(__file__).parents[2])}
