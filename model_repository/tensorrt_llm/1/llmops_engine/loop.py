"""The engine thread: takes what Triton brought, steps the runtime, hands the new tokens to the sinks.

Everything that touches the runtime or a sink happens on this one thread, so neither needs locks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from .request import GenerationRequest, Refused
from .runtime import FAILED, EngineRuntime, EngineStats, StepOutput
from .sinks import Sink

# A cancel is looked for at most this often per request (s): asking Triton costs a round trip between processes.
CANCEL_POLL = 0.05
METRICS_PERIOD = 0.1


class Job:
    """One request: its sink and the sequences that are still running, by engine key."""

    __slots__ = ("keys", "polled", "request", "request_id", "sink")

    def __init__(self, request_id: str, request: GenerationRequest, sink: Sink) -> None:
        self.request_id = request_id
        self.request = request
        self.sink = sink
        self.keys: dict[int, int] = {}
        self.polled = 0.0


class EngineLoop:
    """`submit` and `stop_requests` may be called from any thread; `report` gets the stats now and then."""

    def __init__(
        self, runtime: EngineRuntime, report: Callable[[EngineStats], None], log_error: Callable[[str], None]
    ) -> None:
        self._runtime = runtime
        self._report = report
        self._log_error = log_error
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._running = True
        self._jobs: dict[int, Job] = {}
        self._next_key = 0
        self._reported = 0.0
        # called after each step and each message; returns the longest pause it can bear while there is no work (s)
        self.after_step: Callable[[bool], float | None] = lambda idle: None
        self._pause: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self.post(lambda: self.admit(job))

    def stop_requests(self, request_id: str, done: Callable[[], None]) -> None:
        """End all requests with this id, then call `done` on the engine thread."""
        self.post(lambda: self._stop(request_id, done))

    def close(self) -> None:
        """End the thread after the step that is running, and the runtime with it."""
        self._running = False
        self._wake.set()
        self._thread.join()
        self._runtime.close()

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` done on the engine thread before its next step."""
        self._inbox.append(action)
        self._wake.set()

    def _run(self) -> None:
        while self._running:
            if not self._inbox and not self._runtime.has_work():
                self._report_stats(force=True)
                self._wake.wait(self._pause)
            self._wake.clear()
            while self._inbox:
                self._inbox.popleft()()
            self._drop_cancelled()
            idle = not self._runtime.has_work()
            if not idle:
                self._step()
            self._pause = self.after_step(idle)
            self._report_stats()

    def admit(self, job: Job) -> None:
        """Start a job. On the engine thread only."""
        try:
            for sequence in range(job.request.num_sequences):
                self._next_key += 1
                self._runtime.submit(self._next_key, job.request, sequence)
                job.keys[self._next_key] = sequence
                self._jobs[self._next_key] = job
        except Refused as refusal:
            self._forget(job)
            job.sink.fail(str(refusal))
        except Exception as error:  # noqa: BLE001 - a request that the runtime chokes on must not end the server
            self._forget(job)
            self._log_error(f"a request could not be started: {error}")
            job.sink.fail(f"the engine failed: {error}")

    def _stop(self, request_id: str, done: Callable[[], None]) -> None:
        for job in {id(job): job for job in self._jobs.values() if job.request_id == request_id}.values():
            self.end(job)
        done()

    def _drop_cancelled(self) -> None:
        now = time.monotonic()
        for job in {id(job): job for job in self._jobs.values()}.values():
            if now - job.polled >= CANCEL_POLL:
                job.polled = now
                if job.sink.is_cancelled():
                    self.end(job)

    def end(self, job: Job) -> None:
        """Take a job out of the batch. On the engine thread only."""
        self._forget(job)
        job.sink.end()

    def _forget(self, job: Job) -> None:
        for key in job.keys:
            self._runtime.cancel(key)
            self._jobs.pop(key, None)
        job.keys.clear()

    def _step(self) -> None:
        try:
            outputs = list(self._runtime.step())
        except Exception as error:  # noqa: BLE001 - one bad step must not end the server
            self._fail_all(f"the engine failed: {error}")
            return
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        job = self._jobs.get(output.key)
        if job is None:
            return
        sequence = job.keys[output.key]
        if output.finish:
            del job.keys[output.key], self._jobs[output.key]
        if output.finish == FAILED:
            self._forget(job)
            job.sink.fail(output.error)
            return
        job.sink.tokens(sequence, output.token_ids, output.log_probs, bool(output.finish), not job.keys)

    def _fail_all(self, message: str) -> None:
        self._log_error(message)
        for job in {id(job): job for job in self._jobs.values()}.values():
            self._forget(job)
            job.sink.fail(message)

    def _report_stats(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._reported >= METRICS_PERIOD:
            self._reported = now
            self._report(self._runtime.stats())
