"""The engine thread: accept requests, step the runtime, and deliver new tokens to the sinks.

All calls of the runtime and of the sinks happen on this thread, so neither needs locks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import llmops_contract as contract

from .engine_runtime import (
    ENGINE_FAILED,
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

#: Minimum seconds between two checks for a request's cancellation. Each check is a call to Triton
#: in another process.
CANCEL_POLL = 0.05
#: Minimum seconds between two reports of metrics. Each report sends messages to Triton's process.
METRICS_PERIOD = 0.1
#: Minimum seconds between two log lines about failed requests, which clients can repeat.
LOG_PERIOD = 1.0
#: Start of the log line that is written once when an engine has ended. `llmops serve` searches
#: Triton's log for it (model_repository/server/triton_log.py).
ENGINE_ENDED_MESSAGE = "the engine has ended"
QUEUE_FULL_MESSAGE = f"{contract.QUEUE_FULL_PREFIX}: as many sequences wait as max_queue_size allows; retry later"


class ActiveRequest:
    """A request in the engine.

    `keys` maps the engine key of each running sequence to the sequence's index in the request.
    `preparation` is the work that must finish before the request starts. `polled_at` is the time of
    the last check for cancellation, and `generated` the number of new tokens.
    """

    __slots__ = ("generated", "keys", "polled_at", "preparation", "request", "request_id", "sink", "started")

    def __init__(self, request_id: str, request: RuntimeRequest, sink: ResponseSink) -> None:
        self.request_id = request_id
        self.request = request
        self.sink = sink
        self.keys: dict[int, int] = {}
        self.preparation: Preparation | None = None
        self.polled_at = 0.0
        self.generated = 0
        self.started = False


class EngineLoop:
    """The engine thread of one model. Any thread may call `submit`, `stop_requests` and `post`.

    `failure` is empty until the engine has ended. Every later request fails with this message, and
    the model is no longer ready. `after_step` is called after each step and each message with True
    if the engine is idle. `after_step` returns the seconds after which the loop calls it again
    while there is no work.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        report: Callable[[EngineStats], None],
        log_error: Callable[[str], None],
        max_open: int,
    ) -> None:
        """Create the loop, which `start` runs.

        Args:
            runtime: The library that generates.
            report: Called with the engine's statistics, at most once per METRICS_PERIOD.
            log_error: Called with each message for Triton's log.
            max_open: The maximum number of sequences that run or wait. Further requests are
                rejected.
        """
        self._runtime = runtime
        self._report = report
        self._log_error = log_error
        self._logged_at, self._unlogged = -LOG_PERIOD, 0
        self._max_open = max_open
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._running = True
        runtime.wake = self._wake.set
        self._by_key: dict[int, ActiveRequest] = {}
        self._preparing: list[ActiveRequest] = []
        self._next_key = 0
        self._reported_at = 0.0
        self._report_failed = False
        # numbers of prompt and generated tokens of each request that ended since the last report
        self._ended_lengths: list[tuple[int, int]] = []
        self.failure = ""
        # seconds of the last step, and tokens of the prompts whose first token came in the step
        self._step_seconds, self._prefilled = 0.0, 0
        self.after_step: Callable[[bool], float | None] = lambda idle: None
        self._pause: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, active: ActiveRequest) -> None:
        """Pass a request to `admit` on the engine thread."""
        self.post(lambda: self.admit(active))

    def stop_requests(self, request_id: str, done: Callable[[], None]) -> None:
        """End all requests with this id, then call `done` on the engine thread."""
        self.post(lambda: self._stop(request_id, done))

    def close(self) -> None:
        """End the thread after the current step, then close the runtime."""
        self._running = False
        self._wake.set()
        self._thread.join()
        try:
            self._runtime.close()
        except Exception as error:  # noqa: BLE001 - a library that is dead may be unable to end
            self._log_error(f"The engine could not free its resources at shutdown: {error}")

    def post(self, action: Callable[[], None]) -> None:
        """Call `action` on the engine thread before its next step."""
        self._inbox.append(action)
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._running:
                self._iterate()
        except BaseException as error:  # noqa: BLE001 - a thread that ends in silence leaves every request hanging
            self._end_engine(error)
            while self._running:
                self._iterate_dead()

    def _iterate(self) -> None:
        if not self._inbox and not self._runtime.has_work():
            self._report_stats(force=True)
            if not self._preparing:
                self._run_idle_work()
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
        """Log once that the engine has ended, and fail all open requests with the reason."""
        reason = str(error) if isinstance(error, DeadEngineError) else f"{type(error).__name__}: {error}"
        self.failure = f"{contract.ENGINE_DEAD_PREFIX}: it has ended and takes no requests ({reason})"
        self._log_error(f"{ENGINE_ENDED_MESSAGE}: {reason}")
        for active in self._open_requests():
            active.keys.clear()
            self._attempt(partial(active.sink.fail, self.failure))
        self._by_key.clear()
        self._preparing.clear()

    def _iterate_dead(self) -> None:
        """Run one iteration after the engine has died: reject new requests and close the streams."""
        self._attempt(lambda: self.after_step(True))
        self._wake.wait(CANCEL_POLL)
        self._wake.clear()
        while self._inbox:
            self._attempt(self._inbox.popleft())

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the other requests must be notified as well
            self._log_error(f"A request could not be notified that the engine has ended: {error}")

    def _run_idle_work(self) -> None:
        try:
            self._runtime.on_idle()
        except Exception as error:  # noqa: BLE001 - each request gets the error when it is submitted
            self._log_error(f"The idle engine failed in its background work, and continues: {error}")

    def _longest_pause(self) -> float | None:
        if not self._preparing:
            return self._pause
        return CANCEL_POLL if self._pause is None else min(self._pause, CANCEL_POLL)

    def admit(self, active: ActiveRequest) -> None:
        """Start a request, now or when its preparation is done. Call on the engine thread only."""
        if self.failure:
            active.sink.fail(self.failure)
        elif self._open_sequences() >= self._max_open:
            active.sink.fail(QUEUE_FULL_MESSAGE)
        elif self._try(active, self._prepare, "prepared"):
            if active.preparation is None:
                self._try(active, self._start, "started")
            else:
                self._preparing.append(active)

    def _try(self, active: ActiveRequest, action: Callable[[ActiveRequest], None], what: str) -> bool:
        """Call `action` with the request, and return True.

        If the call raises an error, fail the request and return False. `what` is the participle for
        the log, such as "started".
        """
        try:
            action(active)
        except RequestRejectedError as rejection:
            self._forget(active)
            active.sink.fail(str(rejection))
        except Exception as error:  # noqa: BLE001 - a request that the runtime chokes on must not end the server
            self._forget(active)
            self._log_failed_request(f"A request could not be {what}: {error}")
            active.sink.fail(f"{ENGINE_FAILED}: {error}")
        else:
            return True
        return False

    def _log_failed_request(self, message: str) -> None:
        """Log the message, or only count it if LOG_PERIOD has not passed since the last one."""
        now = time.monotonic()
        if now - self._logged_at < LOG_PERIOD:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last such line)" if self._unlogged else ""
        self._logged_at, self._unlogged = now, 0
        self._log_error(message + more)

    def _prepare(self, active: ActiveRequest) -> None:
        active.preparation = self._runtime.prepare(active.request)

    def _start(self, active: ActiveRequest) -> None:
        for sequence in range(active.request.num_sequences):
            self._next_key += 1
            self._runtime.submit(self._next_key, active.request, sequence)
            active.keys[self._next_key] = sequence
            self._by_key[self._next_key] = active

    def _start_prepared(self) -> None:
        for active in list(self._preparing):
            preparation = active.preparation
            if preparation is not None and preparation.done:
                self._preparing.remove(active)
                if preparation.rejection:
                    active.sink.fail(preparation.rejection)
                else:
                    self._try(active, self._start, "started")

    def _stop(self, request_id: str, done: Callable[[], None]) -> None:
        for active in self._open_requests():
            if active.request_id == request_id:
                self.end(active)
        done()

    def _open_sequences(self) -> int:
        return len(self._by_key) + sum(active.request.num_sequences for active in self._preparing)

    def _open_requests(self) -> list[ActiveRequest]:
        return [*{id(active): active for active in self._by_key.values()}.values(), *self._preparing]

    def _drop_cancelled(self) -> None:
        now = time.monotonic()
        for active in self._open_requests():
            if now - active.polled_at >= CANCEL_POLL:
                active.polled_at = now
                if active.sink.is_cancelled():
                    self.end(active)

    def end(self, active: ActiveRequest) -> None:
        """Remove a request from the batch. Call on the engine thread only."""
        self._forget(active)
        active.sink.end()

    def _forget(self, active: ActiveRequest) -> None:
        if active.preparation is not None and active in self._preparing:
            self._preparing.remove(active)
            active.preparation.remove_waiter()
        for key in active.keys:
            self._runtime.cancel(key)
            self._by_key.pop(key, None)
        active.keys.clear()
        if active.started:
            self._record_lengths(active)

    def fail_open(self, message: str) -> None:
        """Fail all requests, also requests that are still being prepared.

        Call on the engine thread only.
        """
        for active in self._open_requests():
            self._forget(active)
            active.sink.fail(message)

    def _step(self) -> None:
        started, self._prefilled = time.monotonic(), 0
        try:
            outputs = list(self._runtime.step())
            self._step_seconds = time.monotonic() - started
        except DeadEngineError:
            raise
        except Exception as error:  # noqa: BLE001 - one bad step must not end the server
            self._fail_all(f"{ENGINE_FAILED}: {error}")
            return
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        active = self._by_key.get(output.key)
        if active is None:
            return
        sequence = active.keys[output.key]
        if output.finish:
            del active.keys[output.key], self._by_key[output.key]
        if output.finish == FAILED:
            self._forget(active)
            active.sink.fail(output.error)
            return
        if not active.started:
            active.started = True
            self._prefilled += int(active.request.input_ids.size) - (output.cached or 0)
            active.sink.begin(sequence, output.cached, output.prompt)
        active.generated += len(output.token_ids)
        if not active.keys:
            self._record_lengths(active)
        active.sink.add_tokens(
            sequence, output.token_ids, output.log_probs, bool(output.finish), not active.keys, output.tops
        )

    def _record_lengths(self, active: ActiveRequest) -> None:
        """Record the prompt and answer length of a request, whatever ended it.

        Audits compare the usage of tenants with the sum of these lengths.
        """
        self._ended_lengths.append((int(active.request.input_ids.size), active.generated))

    def _fail_all(self, message: str) -> None:
        """Fail the requests in the batch. Requests that wait for a preparation continue to wait."""
        self._log_error(message)
        for active in {id(active): active for active in self._by_key.values()}.values():
            self._forget(active)
            active.sink.fail(message)
        try:
            self._runtime.recover()
        except Exception as error:  # noqa: BLE001 - the next step and its requests fail then
            self._log_error(f"The engine could not recover from the failed step, so the next step may fail: {error}")

    def _report_stats(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._reported_at >= METRICS_PERIOD:
            self._reported_at = now
            try:
                self._report(self._stats())
            except Exception as error:  # noqa: BLE001 - metrics must not end the engine
                if not self._report_failed:
                    self._log_error(f"The engine's metrics could not be reported and may be old: {error}")
                self._report_failed = True

    def state(self) -> EngineState:
        """Return the engine's state after its last step. Must be called on the engine thread."""
        stats = self._runtime.stats()
        return EngineState(
            running=stats.active - stats.waiting,
            waiting=stats.waiting + sum(active.request.num_sequences for active in self._preparing),
            waiting_tokens=stats.context_tokens + sum(int(active.request.input_ids.size) for active in self._preparing),
            free_blocks=stats.kv_blocks_max - stats.kv_blocks_used,
            blocks=stats.kv_blocks_max,
            tokens_per_block=stats.tokens_per_block,
            prefill_tokens=self._prefilled if stats.prefilled is None else stats.prefilled,
            step_us=round(self._step_seconds * 1e6),
        )

    def take_kv_events(self) -> Iterable[KvCacheEvent]:
        """Return the runtime's KV-cache events since the last call. Call on the engine thread only."""
        # an engine that has ended cannot be asked, and gateways must be notified of its end
        return () if self.failure else self._runtime.take_kv_events()

    def _stats(self) -> EngineStats:
        # Requests whose grammars are compiled need no step: `llmops serve` would take them for a hang.
        ended, self._ended_lengths = tuple(self._ended_lengths), []
        return self._runtime.stats()._replace(ended=ended)
