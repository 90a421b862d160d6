"""An answer in progress: the engine's token streams, the choices they fill, and the clock.

Streaming and plain answers of every endpoint read the same thing: `next` until None. A choice of an answer that is
shown as a whole may give way to another in its place: what was added to the first is no part of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from llmops.gateway.errors import ApiError, CancelledStreamError, EngineTimeoutError, UnsupportedError
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.sampling import with_request_field
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome, TokenBatch, TokenSink, TokenStream, Usage
from llmops.gateway.settings import Timeouts
from llmops.gateway.telemetry.event_loop_lag import PROCESS_STALL_THRESHOLD
from llmops.gateway.telemetry.metrics import AnswerMeter


class ChoiceDelta(NamedTuple):
    """What the engine added to one choice: `text` may be empty; `ended` with the last one."""

    choice: Choice
    text: str
    ended: bool


class Answer:
    """Runs until all choices have ended; the engine's slot is free as soon as they have, or on `cancel`."""

    def __init__(
        self,
        stream: TokenStream,
        choices: list[Choice],
        meter: AnswerMeter,
        timeouts: Timeouts,
        prompt_tokens: int,
        leave: Callable[[], None],
        context: RequestContext,
        fresh: Callable[[int], Choice] | None = None,
    ) -> None:
        """`leave` releases its places among the sequences in progress; `context` gets usage and outcome at the end.
        `fresh` makes a choice anew, where the answer is shown as a whole."""
        self._stream, self._fresh = stream, fresh
        self.choices = choices
        self.meter = meter
        self.timeouts = timeouts
        self.prompt_tokens = prompt_tokens
        self._leave = leave
        self._context, self._tally = context, context.usage_recorder
        # what ended it early, in an Outcome's terms; keeping the error itself would keep these frames alive
        self.broken = ""
        self._open = len(choices)
        self._ended: list[Choice] = []
        self._over = self._left = self._complete = False
        self._first: ChoiceDelta | None = None
        # seconds spent in `next` and `start`: waiting for tokens, and turning them into text
        self.waited = self.detokenised = 0.0
        self._clock = StreamWatchdog(stream, meter, timeouts)
        if context.reservation is not None:
            context.reservation.follow(lambda: self.usage)

    @property
    def usage(self) -> Usage:
        """What it used so far."""
        if self._complete and self._context.usage is not None:
            return self._context.usage
        completion = reasoning = 0
        for choice in self.choices:
            completion += choice.completion_tokens
            reasoning += choice.reasoning_tokens
        return Usage(self.prompt_tokens, completion, reasoning, self._stream.cached_tokens)

    @property
    def continued(self) -> str:
        """Whether it went on on another replica: `exact` when its text is what it would have been, else `approximate`,
        empty when it did not."""
        splices = self._stream.splices
        return "approximate" if "approximate" in splices else "exact" if splices else ""

    @property
    def finish(self) -> str:
        """How it ended, in an Outcome's terms."""
        if self.broken:
            return self.broken
        for choice in self.choices:
            if not choice.done:
                return "cancelled"
        return self.choices[0].finish_reason

    async def start(self) -> None:
        """Wait for the first tokens. Raises the engine's error if it sends one instead."""
        try:
            self._first = await self._next_delta()
        except UnsupportedError as error:
            self.close()
            raise with_request_field(error) from error
        except BaseException:
            self.close()
            raise
        if self._tally is not None and self._stream.cached_tokens is not None:
            self._tally.cached(self._stream.cached_tokens)

    async def next(self) -> ChoiceDelta | None:
        """The next delta, None when all choices have ended. Raises ApiError when the engine fails midway.

        What it used is written down when this says that it is over.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        delta = await self._next_delta()
        if delta is None and not self._complete:
            self._complete = True
            self._tell(200)
        return delta

    def attach(self, sink: TokenSink) -> None:
        """Offer tokens to `sink` first; the ones it takes, with `take`, do not come from `next`.

        An answer whose filters have to be awaited offers none.
        """
        if not any(choice.guard is not None and choice.guard.waits for choice in self.choices):
            self._stream.attach(sink)

    def cancel(self) -> None:
        """The client has left, or was dropped."""
        if not self._over and not self._left:
            self._left = True
            self.meter.cancelled()
            self._stream.cancel()

    def close(self) -> None:
        """Free everything; the answer is over after this, whatever happened."""
        self._over = True
        self._clock.stop()
        self._stream.cancel()
        self._leave()
        for choice in self.choices:
            if choice.guard is not None:
                choice.guard.close()
        if not self._complete:
            self._tell(CancelledStreamError.status if self.finish == "cancelled" else 500 if self.broken else 200)
        self.meter.end(self._context.usage or self.usage, self._context.finish_reason)

    def _break(self, error: ApiError) -> None:
        self.broken = error.finish_reason
        self._tell(error.status)

    def _tell(self, status: int) -> None:
        """What it used and how it ended; only the first time is written down."""
        usage, finish, stream, context = self.usage, self.finish, self._stream, self._context
        context.usage, context.finish_reason = usage, finish
        context.splice, context.replica, context.failovers = self.continued, stream.replica, stream.moves
        if self._tally is not None:
            outcome = Outcome(status, finish, usage)
            self._tally.end(outcome, self.meter.first, context.replica, sum(stream.splices.values()))

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
        if self._over:
            return self._next_ended()
        asked = perf_counter()
        try:
            batch = await self._stream.__anext__()
        except StopAsyncIteration:
            self._finish_open()
            return self._next_ended()
        except CancelledStreamError:
            if self._over:
                return self._next_ended()
            error = self._clock.expired or CancelledStreamError()
            self._break(error)
            raise error from None
        except ApiError as error:
            self._over = True
            self._break(error)
            raise
        finally:
            came = perf_counter()
            self.waited += came - asked
        delta = self.take(batch)
        self.detokenised += perf_counter() - came
        return delta

    def take(self, batch: TokenBatch) -> ChoiceDelta:
        """What the tokens add to their choice."""
        choice = self.choices[batch.sequence]
        if batch.anew:
            return ChoiceDelta(self._replace_choice(choice), "", False)
        before = choice.completion_tokens
        was_done = choice.done
        text = choice.feed(batch)
        self.meter.tokens(choice.completion_tokens - before)
        if self._tally is not None:
            self._tally.count(self.meter.total)
        if choice.done and not was_done:
            self._count_ended()
        return ChoiceDelta(choice, text, choice.done and not was_done)

    def _count_ended(self) -> None:
        self._open -= 1
        # stop strings and filters are the gateway's own: the engine would go on to max_tokens
        if self._open == 0 and any(
            isinstance(one.stop_reason, str) or one.finish_reason == "content_filter" for one in self.choices
        ):
            self._over = True
            self._stream.cancel()

    def _replace_choice(self, choice: Choice) -> Choice:
        """The one in its place. One that has ended needs nothing more."""
        if choice.done or self._fresh is None:
            return choice
        self.meter.forget(choice.completion_tokens)
        fresh = self.choices[choice.index] = self._fresh(choice.index)
        return fresh

    def _finish_open(self) -> None:
        self._over = True
        self._ended = [choice for choice in self.choices if not choice.done]

    def _next_ended(self) -> ChoiceDelta | None:
        if not self._ended:
            return None
        choice = self._ended.pop(0)
        return ChoiceDelta(choice, choice.finish(), True)


class StreamWatchdog:
    """Ends a stream that is silent for too long; checks a few times per period instead of once per token."""

    def __init__(self, stream: TokenStream, meter: AnswerMeter, timeouts: Timeouts) -> None:
        self._stream = stream
        self._meter = meter
        self._timeouts = timeouts
        self._started = perf_counter()
        # when it was last seen to look for another replica
        self._moved = 0.0
        self.expired: EngineTimeoutError | None = None
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(min(self._wait(), timeouts.idle), self._check)

    def stop(self) -> None:
        self._handle.cancel()

    def _wait(self) -> float:
        """Seconds until something may be overdue."""
        last = self._meter.last and max(self._meter.last, self._moved)
        overdue = last + self._timeouts.idle if last else self._started + self._timeouts.first_token
        return min(overdue, self._started + self._timeouts.total) - perf_counter()

    def _check(self) -> None:
        if self._stream.is_failing_over:
            self._moved = perf_counter()
        wait = self._wait()
        if self._loop.time() - self._handle.when() > PROCESS_STALL_THRESHOLD:
            wait = max(wait, PROCESS_STALL_THRESHOLD)
        if wait > 0:
            # the limit is long before the first token, and a stream may begin at any time
            self._handle = self._loop.call_later(min(wait, self._timeouts.idle), self._check)
            return
        silent = perf_counter() - (self._meter.last or self._started)
        self.expired = EngineTimeoutError(f"The engine sent nothing for {silent:.0f} s; send the request again.")
        self._stream.cancel()
