"""A runtime in a process of its own, under the Python that has TensorRT-LLM.

Triton's Python backend of the nvidia-pytriton wheel cannot read string tensors with numpy 2, and TensorRT-LLM 1.3 wants
numpy 2: each gets its own Python. One message per step crosses a socket pair; a process that ends is a dead engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..request import GenerationRequest
from ..runtime import EngineDead, EngineRuntime, EngineStats, KvChange, StepOutput

# the Python that has TensorRT-LLM, where it is not the one that Triton's stub runs
PYTHON_VARIABLE = "LLMOPS_TRTLLM_PYTHON"
_STEP_WAIT, _CLOSE_WAIT = 0.05, 30.0


class RemoteRuntime(EngineRuntime):
    """`options`: a TrtllmOptions. Raises ValueError with the worker's own sentence when it does not start."""

    def __init__(self, python: str, options: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", f"{__package__}.remote_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        self._connection = Connection(ours.detach())
        self._running: set[int] = set()
        self._changes: list[KvChange] = []
        self._stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, options.max_batch_size)
        self._connection.send(asdict(options))
        refusal = self._receive()
        if refusal:
            self._process.wait(_CLOSE_WAIT)
            raise ValueError(refusal)
        threading.Thread(target=self._watch, name="trtllm-process", daemon=True).start()

    def submit(self, key: int, request: GenerationRequest, sequence: int) -> None:
        # not every numpy version reads the arrays of another
        ids: Any = request.input_ids.reshape(-1).tolist()
        self._running.add(key)
        self._send(("submit", key, replace(request, input_ids=ids), sequence))

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
        self._changes += [KvChange(*one) for one in changes]
        self._stats = EngineStats(*stats)
        return [StepOutput(*one) for one in new]

    def stats(self) -> EngineStats:
        return self._stats if self._running else self._stats._replace(active=0, scheduled=0, waiting=0, context=0)

    def kv_changes(self) -> Iterable[KvChange]:
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
        """The next message. Raises EngineDead, with what the worker said last or how it ended."""
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        if kind == "dead":
            raise EngineDead(content)
        return content

    def _dead(self) -> EngineDead:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return EngineDead("its process no longer answers")
        return EngineDead(f"its process ended with code {code}")
