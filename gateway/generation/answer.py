"""A running answer, which collects the tokens of an engine stream into choices.

The answer runs until all choices have ended.

Endpoints call `next` until it returns None, for streamed and for plain answers. An answer that is
sent as a whole may start again after a failover. An empty choice then replaces the old choice, and
the deltas of the old choice are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from llmops.gateway.errors import (
    ApiError,
    CancelledStreamError,
    EngineError,
    EngineTimeoutError,
    UnsupportedError,
)
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.sampling import with_request_field
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome, TokenBatch, TokenSink, TokenStream, Usage
from llmops.gateway.settings import Timeouts
from llmops.gateway.telemetry.event_loop_lag import PROCESS_STALL_THRESHOLD
from llmops.gateway.telemetry.metrics import AnswerMeter

#: Function that is called with each batch of tokens, and with the number of prompt tokens that were
#: in the engine's cache.
TokenCallback = Callable[[Sequence[int], int | None], None]


class ChoiceDelta(NamedTuple):
    """The text that an engine added to one choice, possibly empty.

    Attributes:
        choice: The choice.
        text: The text.
        ended: True for the last delta of the choice.
    """

    choice: Choice
    text: str
    ended: bool


class Answer:
    """A generation in progress.

    The engine's slots are released when the last choice ends or on `cancel`.
    """

    def __init__(
        self,
        stream: TokenStream,
        choices: list[Choice],
        *,
        meter: AnswerMeter,
        timeouts: Timeouts,
        prompt_tokens: int,
        release_slots: Callable[[], None],
        context: RequestContext,
        make_choice: Callable[[int], Choice] | None = None,
        on_tokens: TokenCallback | None = None,
    ) -> None:
        """Create the answer of a stream, and start its timeouts.

        Args:
            stream: The stream of the engine's tokens.
            choices: The choices by the number of their sequence.
            meter: The metrics of the request.
            timeouts: Limits on the engine's silence.
            prompt_tokens: Tokens of all prompts.
            release_slots: Releases the slots of the answer's sequences.
            context: The context of the request, which receives usage and outcome at the end.
            make_choice: Makes an empty choice, for an answer that is sent as a whole and that
                failover replays; None for other answers.
            on_tokens: Called with each batch of tokens. All tokens then come from `next`; see
                `attach`.
        """
        self._stream, self._make_choice, self._on_tokens = stream, make_choice, on_tokens
        self.choices = choices
        self.meter = meter
        self.timeouts = timeouts
        self.prompt_tokens = prompt_tokens
        self._release_slots = release_slots
        self._context, self._recorder = context, context.usage_recorder
        # The kind of error that ended the answer early. Keeping the error itself would keep its
        # frames alive.
        self.error_finish = ""
        self._open = len(choices)
        # Choices that the engine's stream left without an end.
        self._unfinished: list[Choice] = []
        # `_over` is True once no more tokens come, `_cancelled` after `cancel`, and `_complete` once
        # usage and outcome are final.
        self._over = self._cancelled = self._complete = False
        self._cancel_error: ApiError | None = None
        self._first: ChoiceDelta | None = None
        # Seconds for which `next` and `start` waited for the engine, and detokenized.
        self.engine_seconds = self.detokenize_seconds = 0.0
        self._watchdog = StreamWatchdog(stream, meter, timeouts)
        if context.reservation is not None:
            context.reservation.follow(lambda: self.usage)

    @property
    def usage(self) -> Usage:
        """Return the tokens used so far."""
        if self._complete and self._context.usage is not None:
            return self._context.usage
        completion = reasoning = 0
        for choice in self.choices:
            completion += choice.completion_tokens
            reasoning += choice.reasoning_tokens
        return Usage(self.prompt_tokens, completion, reasoning, self._stream.cached_tokens)

    @property
    def failover_quality(self) -> str:
        """Return `exact`, `approximate` or an empty string: how failover affected the text.

        `exact` means that failover did not affect the text; `approximate` means that failover may
        have affected the text. The string is empty without a failover.
        """
        splices = self._stream.splices
        return "approximate" if "approximate" in splices else "exact" if splices else ""

    @property
    def finish(self) -> str:
        """Return the finish reason, or the kind of error that ended the answer early."""
        if self.error_finish:
            return self.error_finish
        for choice in self.choices:
            if not choice.done:
                return "cancelled"
        return self.choices[0].finish_reason

    async def start(self) -> None:
        """Wait for the first tokens.

        Raises:
            ApiError: The engine sent an error instead of tokens.
        """
        try:
            self._first = await self._next_delta()
        except UnsupportedError as error:
            self.close()
            raise with_request_field(error) from error
        except BaseException as error:
            self.abandon(error)
            raise
        if self._recorder is not None and self._stream.cached_tokens is not None:
            self._recorder.cached(self._stream.cached_tokens)

    async def next(self) -> ChoiceDelta | None:
        """Return the next delta, or None when all choices have ended and usage is final.

        Raises:
            ApiError: The engine failed.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        delta = await self._next_delta()
        if delta is None and not self._complete:
            self._complete = True
            self._record_outcome(200)
        return delta

    def attach(self, sink: TokenSink) -> None:
        """Offer tokens to `sink` before they reach `next`.

        The sink calls `take` for the tokens that it handles, and `next` returns only the other
        tokens. An answer with asynchronous filters or with recorded tokens offers none to the sink.
        """
        if self._on_tokens is None and not any(
            choice.guard is not None and choice.guard.waits for choice in self.choices
        ):
            self._stream.attach(sink)

    def cancel(self, error: ApiError | None = None) -> None:
        """Cancel the generation because of `error`, or if it is None, because the client disconnected."""
        if not self._over and not self._cancelled:
            self._cancelled, self._cancel_error = True, error
            if error is None:
                self.meter.cancelled()
            self._stream.cancel()

    def abandon(self, error: BaseException) -> None:
        """End the answer because of `error`, before the client has received any of it.

        The answer costs nothing, unless the client is the cause: it has disconnected, or the status
        of `error` is below 500.
        """
        status, finish = (error.status, error.finish_reason) if isinstance(error, ApiError) else (500, "error")
        if status >= 500 and not self._cancelled and not self._complete:
            self.error_finish, self._complete = finish, True
            self._context.usage = Usage(self.prompt_tokens)
            self._record_outcome(status)
        self.close()

    def close(self) -> None:
        """End the answer, however it ran, and release everything that it holds."""
        self._over = True
        self._make_choice = None  # The callback holds a reference to the request.
        self._watchdog.timer.cancel()
        self._stream.cancel()
        # The sink holds a reference to this answer and its request: a body would stay in memory until
        # the cycle is collected.
        self._stream.attach(lambda batch: False)
        self._release_slots()
        for choice in self.choices:
            if choice.guard is not None:
                choice.guard.close()
        if not self._complete:
            self._record_outcome(
                CancelledStreamError.status if self.finish == "cancelled" else 500 if self.error_finish else 200
            )
        self.meter.end(self._context.usage or self.usage, self._context.finish_reason)

    def _fail(self, error: ApiError) -> None:
        self.error_finish = error.finish_reason
        self._record_outcome(error.status)

    def _record_outcome(self, status: int) -> None:
        """Write usage and finish reason to the request's context.

        The usage record accepts only the first call.
        """
        usage, finish, stream, context = self.usage, self.finish, self._stream, self._context
        context.usage, context.finish_reason = usage, finish
        context.splice, context.replica, context.failovers = self.failover_quality, stream.replica, stream.moves
        context.version = stream.version
        if self._recorder is not None:
            outcome = Outcome(status, finish, usage)
            self._recorder.end(outcome, self.meter.first, context.replica, sum(stream.splices.values()))

    async def _next_delta(self) -> ChoiceDelta | None:
        delta = await self._receive()
        if delta is None or delta.choice.guard is None or not delta.choice.guard.waits:
            return delta
        choice = delta.choice
        was_done = choice.done and not delta.ended
        text = await choice.judge(delta.text)
        if choice.done and not was_done and not delta.ended:
            self._count_ended()
        return ChoiceDelta(choice, text, choice.done and not was_done)

    async def _receive(self) -> ChoiceDelta | None:
        requested_at, batch = perf_counter(), None
        try:
            if not self._over:
                batch = await self._stream.__anext__()
                if self._on_tokens is not None:
                    self._on_tokens(batch.tokens, self._stream.cached_tokens)
        except StopAsyncIteration:
            self._over = True
            self._unfinished = [choice for choice in self.choices if not choice.done]
        except CancelledStreamError:
            if not self._over:
                error = self._watchdog.expired or self._cancel_error or CancelledStreamError()
                self._fail(error)
                raise error from None
        except ApiError as error:
            self._over = True
            self._fail(error)
            raise
        finally:
            received_at = perf_counter()
            self.engine_seconds += received_at - requested_at
        if batch is None:
            if not self._unfinished:
                return None
            choice = self._unfinished.pop(0)
            return ChoiceDelta(choice, choice.finish(), True)
        try:
            delta = self.take(batch)
        except ApiError as error:
            self._over = True
            self._fail(error)
            raise
        self.detokenize_seconds += perf_counter() - received_at
        return delta

    def take(self, batch: TokenBatch) -> ChoiceDelta:
        """Add tokens to their choice, and return the text that they add.

        Raises:
            EngineError: The tokens do not fit this answer.
        """
        try:
            choice = self.choices[batch.sequence]
            if batch.restarts:
                return ChoiceDelta(self._replace_choice(choice), "", False)
            before = choice.completion_tokens
            was_done = choice.done
            text = choice.feed(batch)
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            raise EngineError(f"The engine sent tokens that do not fit the answer ({error!r}); try again.") from error
        self.meter.tokens(choice.completion_tokens - before)
        if self._recorder is not None:
            self._recorder.count(self.meter.total)
        if choice.done and not was_done:
            self._count_ended()
        return ChoiceDelta(choice, text, choice.done and not was_done)

    def _count_ended(self) -> None:
        """Count the end of a choice, and stop the engine after the last choice."""
        self._open -= 1
        # Stop strings and filters belong to the gateway: the engine would continue up to
        # max_tokens.
        if self._open == 0 and any(
            isinstance(one.stop_reason, str) or one.finish_reason == "content_filter" or one.overran
            for one in self.choices
        ):
            self._over = True
            self._stream.cancel()

    def _replace_choice(self, choice: Choice) -> Choice:
        """Return an empty choice in place of a choice whose tokens are replayed.

        The choice itself is returned if it has ended, or if the answer is not sent as a whole.
        """
        if choice.done or self._make_choice is None:
            return choice
        self.meter.forget(choice.completion_tokens)
        replacement = self.choices[choice.index] = self._make_choice(choice.index)
        return replacement


class StreamWatchdog:
    """A timer that ends a stream whose engine is silent for too long.

    The timer checks a few times per timeout instead of once per token, until `timer` is cancelled.
    """

    def __init__(self, stream: TokenStream, meter: AnswerMeter, timeouts: Timeouts) -> None:
        self._stream = stream
        self._meter = meter
        self._timeouts = timeouts
        self._started = perf_counter()
        # The last time at which the stream was seen searching for another replica.
        self._failing_over_at = 0.0
        self.expired: EngineTimeoutError | None = None
        self._loop = asyncio.get_running_loop()
        # Keep the due time here: uvloop's handle does not return it for a call that is due at once.
        self._due = self._loop.time() + min(timeouts.first_token, timeouts.total, timeouts.idle)
        self.timer = self._loop.call_at(self._due, self._check)

    def _wait(self) -> float:
        """Return the seconds until the next token or the whole answer may be overdue."""
        last = self._meter.last and max(self._meter.last, self._failing_over_at)
        overdue = last + self._timeouts.idle if last else self._started + self._timeouts.first_token
        return min(overdue, self._started + self._timeouts.total) - perf_counter()

    def _check(self) -> None:
        if self._stream.is_failing_over:
            self._failing_over_at = perf_counter()
        wait = self._wait()
        if self._loop.time() - self._due > PROCESS_STALL_THRESHOLD:
            wait = max(wait, PROCESS_STALL_THRESHOLD)
        if wait > 0:
            # Check at least every `idle` seconds: the limit before the first token is longer, but
            # the first token may arrive at any time.
            self._due = self._loop.time() + min(wait, self._timeouts.idle)
            self.timer = self._loop.call_at(self._due, self._check)
            return
        silent = perf_counter() - (self._meter.last or self._started)
        self.expired = EngineTimeoutError(
            f"The engine sent nothing for {silent:.0f} s, which is too long; send the request again."
        )
        self._stream.cancel()
