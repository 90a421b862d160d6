"""The engine thread: takes what Triton brought, steps the runtime, hands the new tokens to the sinks.

Everything that touches the runtime or a sink happens on this one thread, so neither needs locks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import llmops_contract as contract

from .engine_runtime import (
    FAILED,
    DeadEngineError,
    EngineRuntime,
    EngineState,
    EngineStats,
    KvCacheEvent,
    Preparation,
    StepOutput,
)
from .request import RequestRejectedError, RuntimeRequest
from .steps.sinks import ResponseSink

# A cancel is looked for at most this often per request (s): asking Triton costs a round trip between processes.
CANCEL_POLL = 0.05
METRICS_PERIOD = 0.1
# What is logged once when an engine has ended: `llmops serve` looks for it (model_repository/server/triton_log.py)
ENGINE_ENDED_MESSAGE = "the engine has ended"
QUEUE_FULL_MESSAGE = f"{contract.QUEUE_FULL_PREFIX}: as many sequences wait as max_queue_size allows"


class ActiveRequest:
    """One request: its sink and the sequences that are still running, by engine key; or what it waits for."""

    __slots__ = ("begun", "generated", "keys", "polled", "preparation", "request", "request_id", "sink")

    def __init__(self, request_id: str, request: RuntimeRequest, sink: ResponseSink) -> None:
        self.request_id = request_id
        self.request = request
        self.sink = sink
        self.keys: dict[int, int] = {}
        self.preparation: Preparation | None = None
        self.polled = 0.0
        self.generated = 0
        self.begun = False


class EngineLoop:
    """`submit` and `stop_requests` may be called from any thread; `report` gets the stats now and then.

    `failure` is set once the engine has ended, for whatever reason: every request then fails with it, and the model is
    no longer ready.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        report: Callable[[EngineStats], None],
        log_error: Callable[[str], None],
        max_open: int,
    ) -> None:
        """`max_open`: sequences that may run and wait together; any more are refused."""
        self._runtime = runtime
        self._report = report
        self._log_error = log_error
        self._max_open = max_open
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._running = True
        runtime.wake = self._wake.set
        self._jobs: dict[int, ActiveRequest] = {}
        self._preparing: list[ActiveRequest] = []
        self._next_key = 0
        self._reported = 0.0
        self._ended_lengths: list[tuple[int, int]] = []
        self._report_fails = False
        self.failure = ""
        # of the last step: how long it took (s), and the prompt tokens whose first answer it brought
        self._step_seconds, self._prefilled = 0.0, 0
        # called after each step and each message; returns after how long to call it again where there is no work (s)
        self.after_step: Callable[[bool], float | None] = lambda idle: None
        self._pause: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: ActiveRequest) -> None:
        self.post(lambda: self.admit(job))

    def stop_requests(self, request_id: str, done: Callable[[], None]) -> None:
        """End all requests with this id, then call `done` on the engine thread."""
        self.post(lambda: self._stop(request_id, done))

    def close(self) -> None:
        """End the thread after the step that is running, and the runtime with it."""
        self._running = False
        self._wake.set()
        self._thread.join()
        try:
            self._runtime.close()
        except Exception as error:  # noqa: BLE001 - a library that is dead may be unable to end
            self._log_error(f"the engine did not close: {error}")

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` done on the engine thread before its next step."""
        self._inbox.append(action)
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._running:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - a thread that ends in silence leaves every request hanging
            self._end_engine(error)
            while self._running:
                self._turn_away()

    def _turn(self) -> None:
        if not self._inbox and not self._runtime.has_work():
            self._report_stats(force=True)
            if not self._preparing:
                self._rest()
            self._wake.wait(self._longest_pause())
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()
        self._start_prepared()
        self._drop_cancelled()
        working = self._runtime.has_work()
        if working:
            self._step()
        self._pause = self.after_step(not working and not self._preparing)
        self._report_stats()

    def _end_engine(self, error: BaseException) -> None:
        """The engine has ended: log it once, and end what is open with one clear error."""
        reason = str(error) if isinstance(error, DeadEngineError) else f"{type(error).__name__}: {error}"
        self.failure = f"{contract.ENGINE_DEAD_PREFIX}: it has ended and takes no requests ({reason})"
        self._log_error(f"{ENGINE_ENDED_MESSAGE}: {reason}")
        for job in self._open_jobs():
            job.keys.clear()
            self._guarded(partial(job.sink.fail, self.failure))
        self._jobs.clear()
        self._preparing.clear()

    def _turn_away(self) -> None:
        """A turn after the engine has ended: `admit` refuses, and streams are told."""
        self._guarded(lambda: self.after_step(True))
        self._wake.wait(CANCEL_POLL)
        self._wake.clear()
        while self._inbox:
            self._guarded(self._inbox.popleft())

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the others must hear of the end, too
            self._log_error(f"a request could not be told that the engine has ended: {error}")

    def _rest(self) -> None:
        try:
            self._runtime.rest()
        except Exception as error:  # noqa: BLE001 - each request hears of it when it is submitted
            self._log_error(f"the engine failed while it had nothing to do: {error}")

    def _longest_pause(self) -> float | None:
        if not self._preparing:
            return self._pause
        return CANCEL_POLL if self._pause is None else min(self._pause, CANCEL_POLL)

    def admit(self, job: ActiveRequest) -> None:
        """Start a job, now or when what it needs is ready. On the engine thread only."""
        if self.failure:
            job.sink.fail(self.failure)
            return
        if self._open_sequences() >= self._max_open:
            job.sink.fail(QUEUE_FULL_MESSAGE)
            return
        try:
            job.preparation = self._runtime.prepare(job.request)
        except RequestRejectedError as refusal:
            job.sink.fail(str(refusal))
            return
        except Exception as error:  # noqa: BLE001 - a request that the runtime chokes on must not end the server
            self._log_error(f"a request could not be prepared: {error}")
            job.sink.fail(f"the engine failed: {error}")
            return
        if job.preparation is None:
            self._start(job)
        else:
            self._preparing.append(job)

    def _start_prepared(self) -> None:
        for job in list(self._preparing):
            preparation = job.preparation
            if preparation is not None and preparation.done:
                self._preparing.remove(job)
                if preparation.refusal:
                    job.sink.fail(preparation.refusal)
                else:
                    self._start(job)

    def _start(self, job: ActiveRequest) -> None:
        try:
            for sequence in range(job.request.num_sequences):
                self._next_key += 1
                self._runtime.submit(self._next_key, job.request, sequence)
                job.keys[self._next_key] = sequence
                self._jobs[self._next_key] = job
        except RequestRejectedError as refusal:
            self._forget(job)
            job.sink.fail(str(refusal))
        except Exception as error:  # noqa: BLE001 - a request that the runtime chokes on must not end the server
            self._forget(job)
            self._log_error(f"a request could not be started: {error}")
            job.sink.fail(f"the engine failed: {error}")

    def _stop(self, request_id: str, done: Callable[[], None]) -> None:
        for job in self._open_jobs():
            if job.request_id == request_id:
                self.end(job)
        done()

    def _open_sequences(self) -> int:
        return len(self._jobs) + sum(job.request.num_sequences for job in self._preparing)

    def _open_jobs(self) -> list[ActiveRequest]:
        return [*{id(job): job for job in self._jobs.values()}.values(), *self._preparing]

    def _drop_cancelled(self) -> None:
        now = time.monotonic()
        for job in self._open_jobs():
            if now - job.polled >= CANCEL_POLL:
                job.polled = now
                if job.sink.is_cancelled():
                    self.end(job)

    def end(self, job: ActiveRequest) -> None:
        """Take a job out of the batch. On the engine thread only."""
        self._forget(job)
        job.sink.end()

    def _forget(self, job: ActiveRequest) -> None:
        if job.preparation is not None and job in self._preparing:
            self._preparing.remove(job)
            job.preparation.leave()
        for key in job.keys:
            self._runtime.cancel(key)
            self._jobs.pop(key, None)
        job.keys.clear()
        if job.begun:
            self._note_lengths(job)

    def fail_open(self, message: str) -> None:
        """End all that is open, including what still waits. On the engine thread only."""
        for job in self._open_jobs():
            self._forget(job)
            job.sink.fail(message)

    def _step(self) -> None:
        started, self._prefilled = time.monotonic(), 0
        try:
            outputs = list(self._runtime.step())
            self._step_seconds = time.monotonic() - started
        except DeadEngineError:
            raise
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
        if not job.begun:
            job.begun = True
            self._prefilled += int(job.request.input_ids.size) - (output.cached or 0)
            job.sink.begin(sequence, output.cached)
        job.generated += len(output.token_ids)
        if not job.keys:
            self._note_lengths(job)
        job.sink.tokens(sequence, output.token_ids, output.log_probs, bool(output.finish), not job.keys, output.tops)

    def _note_lengths(self, job: ActiveRequest) -> None:
        """However it ended: a bill is held against the sum of what was generated."""
        self._ended_lengths.append((int(job.request.input_ids.size), job.generated))

    def _fail_all(self, message: str) -> None:
        """End what was in the batch; what still waits for its preparation was not part of it."""
        self._log_error(message)
        for job in {id(job): job for job in self._jobs.values()}.values():
            self._forget(job)
            job.sink.fail(message)
        try:
            self._runtime.recover()
        except Exception as error:  # noqa: BLE001 - the next step fails then, and with it the next requests
            self._log_error(f"the engine did not recover: {error}")

    def _report_stats(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._reported >= METRICS_PERIOD:
            self._reported = now
            try:
                self._report(self._stats())
            except Exception as error:  # noqa: BLE001 - metrics must not end the engine
                if not self._report_fails:
                    self._log_error(f"the engine's metrics could not be reported: {error}")
                self._report_fails = True

    def state(self) -> EngineState:
        """The engine's state after its last step. On the engine thread only."""
        stats = self._runtime.stats()
        return EngineState(
            running=stats.active - stats.waiting,
            waiting=stats.waiting + sum(job.request.num_sequences for job in self._preparing),
            waiting_tokens=stats.context_tokens + sum(int(job.request.input_ids.size) for job in self._preparing),
            free_blocks=stats.kv_blocks_max - stats.kv_blocks_used,
            blocks=stats.kv_blocks_max,
            tokens_per_block=stats.tokens_per_block,
            prefill_tokens=self._prefilled if stats.prefilled is None else stats.prefilled,
            step_us=round(self._step_seconds * 1e6),
        )

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        """The runtime's. On the engine thread only."""
        return self._runtime.take_kv_events()

    def _stats(self) -> EngineStats:
        stats, preparing = self._runtime.stats(), len(self._preparing)
        ended, self._ended_lengths = tuple(self._ended_lengths), []
        return stats._replace(active=stats.active + preparing, waiting=stats.waiting + preparing, ended=ended)
