"""Failover of running answers: continue a token stream on another replica.

When a replica crashes, drains, stalls or preempts a request, the request is sent to another replica
as prompt plus the tokens generated so far. The client sees a pause, and neither loses nor repeats
a token.

    STREAMING ──leave()──▶ LEAVING ──replica found──▶ (entered, see below)
        ▲                     │ └──no replica──▶ STREAMING
        │                     └──replica lost──┐
        ├──replica lost──▶ SEARCHING ◀─────────┘
        │                     │ └──no replica for SEARCH_TIMEOUT──▶ ENDED
        │                     ▼ replica found
        ├──nothing to compare─┤
        └──caught up── REPLAYING ──other tokens──▶ SEARCHING for a replica without a replay
                              │
              several sequences ──▶ SPLIT: each sequence is a FailoverStream of its own

Tokens that arrive while a stream is LEAVING are held back: they are dropped once another replica
generates them again, and delivered if the stream stays.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from enum import Enum, StrEnum
from time import perf_counter
from typing import Any, NamedTuple

from llmops.gateway.errors import (
    ApiError,
    CancelledStreamError,
    DrainingError,
    EngineError,
    OverloadedError,
    PreemptedError,
    UnavailableError,
)
from llmops.gateway.interfaces import (
    Engine,
    EngineRequest,
    Failover,
    SchedulingParams,
    TokenBatch,
    TokenSink,
    TokenStream,
)
from llmops.gateway.logging_setup import request_logger
from llmops.gateway.routing.merged_stream import MergedStream
from llmops.gateway.routing.resubmission import (
    has_finished,
    is_deterministic,
    is_greedy,
    needs_replay,
    remaining_request,
    single_sequence_request,
)
from llmops.gateway.telemetry.event_loop_lag import PROCESS_STALL_THRESHOLD

log = request_logger(__name__)

#: Maximum number of failovers per sequence. Preemptions do not count, because the request did not
#: cause them.
MAX_FAILOVERS = 3

#: Maximum number of the latest failovers that a trace shows, because a request may be preempted any
#: number of times.
MAX_RECORDED_FAILOVERS = 16

#: Maximum number of replicas that may fail in sequence without producing a token, so that a request
#: that crashes replicas does not visit all of them.
MAX_FAILURES_WITHOUT_PROGRESS = 2

#: Seconds that a sequence waits for a free replica before its answer fails. Long enough for a slot
#: to become free, short enough that most clients still wait.
SEARCH_TIMEOUT = 10.0

#: Seconds between two searches for a free replica, which bounds the work while all are busy.
SEARCH_INTERVAL = 0.2

#: Number of checks for stalled streams within one silence timeout. Stalls are found by checks, so
#: that no clock is read for each token.
STALL_CHECKS_PER_TIMEOUT = 4


class FailoverReason(StrEnum):
    """The reason why a stream left its replica."""

    CONNECTION_LOST = "lost"  # the gRPC stream broke
    ENGINE_FAILED = "failed"  # the engine returned an error for this request
    QUEUE_FULL = "refused"
    DRAINING = "drain"
    NO_PROGRESS = "suspect"  # no token within the silence timeout
    PREEMPTED = "preempted"  # the request made room for a request of a higher tier
    GATEWAY_LOST = "gateway"  # the gateway that read the stream ended or crashed


class StreamState(Enum):
    """The states of a FailoverStream; the module docstring shows the transitions."""

    STREAMING = 1
    LEAVING = 2
    SEARCHING = 3
    REPLAYING = 4
    SPLIT = 5
    ENDED = 6


class Attempt(NamedTuple):
    """A stream on one replica.

    Attributes:
        stream: The token stream of the replica.
        state: The state of the FailoverStream when it begins to read `stream`.
        restarts: True if the sequence starts over, so that its known tokens are discarded.
    """

    stream: TokenStream
    state: StreamState = StreamState.STREAMING
    restarts: bool = False


class FailoverStream(TokenStream):
    """The token stream of one request, whichever replicas generate the tokens."""

    def __init__(
        self,
        engine: FailoverEngine,
        request: EngineRequest,
        attempt: Attempt,
        known: Sequence[array[int]] = (),
        failed_replicas: tuple[str, ...] = (),
        failover_count: int = 0,
    ) -> None:
        """Create a stream that starts with `attempt`.

        `known`, `failed_replicas` and `failover_count` describe a sequence that is split from a
        request, or that another gateway began.

        Args:
            engine: The engine that opens replacements.
            request: The request as the client sent it.
            attempt: The stream to start with.
            known: For each sequence, the tokens that the reader already has.
            failed_replicas: Replicas that failed on this request, in the order of the failures.
            failover_count: Number of failovers so far that count towards MAX_FAILOVERS.
        """
        self._engine, self._request = engine, request
        self._failed_replicas, self._failover_count, self._failures_without_progress = (
            failed_replicas,
            failover_count,
            0,
        )
        # Tokens that the reader has: recent batches, and all earlier tokens at four bytes each.
        self._recent: list[TokenBatch] = []
        self._known = list(known) or [array("i") for _ in range(request.n)]
        self._ended_sequences: set[int] = set()
        self._known_at_start = 0
        self._cached_tokens: int | None = None
        self._splices: Counter[str] = Counter()
        self._failovers: tuple[Failover, ...] = ()
        self._sink: TokenSink | None = None
        self._verified = 0
        self._cancelled = self._is_awaited = False
        self._error: ApiError | None = None
        # `_search` is the running search for a replica, `_replacement` the attempt that a LEAVING
        # stream has found, and `_held` the tokens held back meanwhile.
        self._search: asyncio.Future[Any] | None = None
        self._replacement: Attempt | None = None
        self._held: deque[TokenBatch] = deque()
        # The number of tokens at the last check for a stall, and the time of the check.
        self._progress = (0, 0.0)
        self._attempt, self._state = attempt, attempt.state
        self._enter(attempt)
        engine.streams.add(self)

    @property
    def replica(self) -> str:  # type: ignore[override]
        """Return the replica that generates the tokens, or "" once the request is split."""
        return self._attempt.stream.replica

    @property
    def version(self) -> str:  # type: ignore[override]
        return self._attempt.stream.version

    def beginning(self) -> Sequence[int]:
        self._count_known()
        return self._known[0] or self._attempt.stream.beginning()

    @property
    def cached_tokens(self) -> int | None:  # type: ignore[override]
        """Return the number of prompt tokens that the first replica found in its cache.

        Return None if the replica did not report the number. Clients do not pay for tokens that a
        failover computes again.
        """
        return self._cached_tokens if self._known_at_start else self._attempt.stream.cached_tokens

    @property
    def is_failing_over(self) -> bool:  # type: ignore[override]
        return self._search is not None or self._attempt.stream.is_failing_over

    @property
    def moves(self) -> Sequence[Failover]:  # type: ignore[override]
        return [*self._failovers, *self._attempt.stream.moves]

    @property
    def splices(self) -> Mapping[str, int]:  # type: ignore[override]
        return self._splices + Counter(self._attempt.stream.splices)

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        self._sink = sink
        self._attach_sink()

    async def __anext__(self) -> TokenBatch:
        self._is_awaited = True
        try:
            while (batch := await self._read()) is None:
                pass
            self._recent.append(batch)
            return batch
        except ApiError:
            self._end()
            raise
        finally:
            self._is_awaited = False

    def leave(self, reason: FailoverReason) -> None:
        """Continue on another replica, which is searched while the current replica generates."""
        if self._state is StreamState.STREAMING and not self._held and self._failover_count < MAX_FAILOVERS:
            self._state = StreamState.LEAVING
            self._attempt.stream.attach(_decline_batch)
            self._search = asyncio.create_task(self._find_replacement(reason))

    def is_stalled(self, now: float, timeout: float) -> bool:
        """Return True if the reader has waited for `timeout` seconds since the last token.

        Must be called several times per `timeout`, because the wait is counted from the first call
        that finds no new token.
        """
        known = self._count_known()
        if (
            not self._is_awaited
            or known == self._known_at_start
            or self._state is not StreamState.STREAMING
            or known != self._progress[0]
        ):
            self._progress = (known, now)
        return now - self._progress[1] >= timeout

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._end()

    # -- reading -----------------------------------------------------------------------------------
    async def _read(self) -> TokenBatch | None:
        """Return the next batch for the reader, or None after a step without a batch."""
        match self._state:
            case StreamState.STREAMING | StreamState.ENDED if self._held:
                batch = self._held.popleft()
                if not self._held:
                    self._attach_sink()
                return batch
            case StreamState.ENDED:
                raise CancelledStreamError if self._cancelled else StopAsyncIteration
            case StreamState.SEARCHING:
                await self._recover()
                return None
            case _:
                return await self._read_attempt()

    async def _read_attempt(self) -> TokenBatch | None:
        try:
            batch = await self._attempt.stream.__anext__()
        except StopAsyncIteration:
            if self._state is StreamState.REPLAYING:
                await self._continue_without_replay()
            else:
                self._end()
            return None
        except CancelledStreamError:
            if self._replacement is not None:
                self._enter(self._replacement)
            elif self._cancelled or self._state is not StreamState.ENDED:
                raise
            return None
        except (UnavailableError, EngineError) as error:
            if self._state is StreamState.SPLIT:
                raise
            self._error, self._state = error, StreamState.SEARCHING
            return None
        if self._state is StreamState.LEAVING or self._held:
            self._held.append(batch)
            return None
        return await self._compare(batch) if self._state is StreamState.REPLAYING else batch

    async def _compare(self, batch: TokenBatch) -> TokenBatch | None:
        """Return the tokens of a replay that the reader does not have yet, or None without any.

        A replay whose tokens differ from the tokens of the reader is ended.
        """
        known = self._known[0][self._verified : self._verified + len(batch.tokens)]
        count = len(known)
        if known.tolist() != list(batch.tokens[:count]):
            await self._continue_without_replay()
            return None
        self._verified += count
        if self._verified == len(self._known[0]):
            self._state = StreamState.STREAMING
            self._attach_sink()
        if count == len(batch.tokens):
            return None
        logprobs = None if batch.logprobs is None else batch.logprobs[count:]
        tops = None if batch.tops is None else batch.tops[count:]
        return batch._replace(tokens=batch.tokens[count:], logprobs=logprobs, tops=tops)

    def _attach_sink(self) -> None:
        if self._sink is not None and self._state is not StreamState.REPLAYING:
            self._attempt.stream.attach(self._sink, self._recent)

    def _count_known(self) -> int:
        """Move the recent batches to `_known`. Return the number of tokens that the reader has."""
        for batch in self._recent:
            self._known[batch.sequence].extend(batch.tokens)
        self._recent.clear()
        return sum(map(len, self._known))

    # -- searching ---------------------------------------------------------------------------------
    async def _find_replacement(self, reason: FailoverReason) -> None:
        """Find a replica while the current replica generates, then cancel the current stream."""
        try:
            self._replacement = await self._open_replacement(reason)
            if self._replacement is None:
                # nothing is left to generate: the engine owes only the end
                self._search = None
                self._end()
        except ApiError as error:
            log.info("Failover cancelled, the answer continues on its replica: %s", error.full_message)
        except Exception:
            # after a bug too, the tokens held back must be delivered
            log.exception("Failover cancelled, the answer continues on its replica")
        if self._replacement is not None:
            self._attempt.stream.cancel()
            return
        self._search = None
        if self._state is StreamState.LEAVING:
            self._state = StreamState.STREAMING
            if not self._held:
                self._attach_sink()

    async def _recover(self) -> None:
        """Continue on another replica after an error.

        Raise the error if no replica can continue.
        """
        error = self._error
        assert error is not None
        if self._search is not None:
            await asyncio.wait({self._search})
            if self._cancelled:
                raise CancelledStreamError
        if self._replacement is not None:
            self._enter(self._replacement)
            return
        reason = _failover_reason(error)
        crashed = reason in (FailoverReason.CONNECTION_LOST, FailoverReason.ENGINE_FAILED)
        if crashed and self._count_known() == self._known_at_start:
            self._failures_without_progress += 1
        else:
            self._failures_without_progress = 0
        is_spent = self._failover_count >= MAX_FAILOVERS and reason != FailoverReason.PREEMPTED
        # if the answer fell back to another version, the failed replicas are that version's too
        is_spent |= self._attempt.stream.version != self._engine.version
        if is_spent or self._failures_without_progress >= MAX_FAILURES_WITHOUT_PROGRESS:
            raise error
        try:
            attempt = await self._interruptible(self._open_replacement(reason))
        except CancelledStreamError:
            raise
        except ApiError as failure:
            log.warning("An answer could not be continued on another replica and fails: %s", failure.full_message)
            raise error from None
        if attempt is None:
            self._held.clear()
            self._end()
        else:
            self._enter(attempt)

    async def _continue_without_replay(self) -> None:
        """Continue from the known tokens after a replay diverged from them.

        Raises:
            UnavailableError: The request has a grammar, whose state is lost.
        """
        self._attempt.stream.cancel()
        if self._request.guide is not None:
            raise UnavailableError(
                "The answer could not be continued on another replica: the state of its grammar is lost; send it again."
            )
        del self._splices["exact"]
        self._enter(await self._interruptible(self._open_sequence(0, self._failed_replicas, replay=False)))

    async def _open_replacement(self, reason: FailoverReason) -> Attempt | None:
        """Open the rest of the request on another replica.

        Return None if nothing is left to generate.
        """
        began, old, known = perf_counter(), self._attempt.stream, self._count_known()
        self._ended_sequences.update(old.ended)
        unfinished = [
            sequence
            for sequence, tokens in enumerate(self._known)
            if sequence not in self._ended_sequences and not has_finished(self._request, tokens)
        ]
        if not unfinished:
            return None
        counts = reason != FailoverReason.PREEMPTED
        failed = (*self._failed_replicas, old.replica) if counts else self._failed_replicas
        if not known:
            attempt = Attempt(await self._open(self._request, failed, is_fresh=True))
        elif self._request.n == 1:
            attempt = await self._open_sequence(0, failed)
        else:
            attempt = await self._split(unfinished, failed, self._failover_count + counts)
        self._failed_replicas, self._failover_count = failed, self._failover_count + counts
        failover = Failover(reason, old.replica, attempt.stream.replica, began, perf_counter())
        self._failovers = (*self._failovers, failover)[-MAX_RECORDED_FAILOVERS:]
        self._engine.count_failover(reason)
        return attempt

    async def _split(self, sequences: Sequence[int], failed: tuple[str, ...], failover_count: int) -> Attempt:
        """Open the rest of each of `sequences` as a request of its own.

        Raise the first error if any of the requests cannot be opened; the other requests are then
        cancelled. The streams start with the `failed` replicas and `failover_count` failovers.
        """
        opened = await asyncio.gather(
            *(self._open_sequence(sequence, failed) for sequence in sequences), return_exceptions=True
        )
        attempts = [one for one in opened if isinstance(one, Attempt)]
        for error in opened:
            if isinstance(error, BaseException):
                for attempt in attempts:
                    attempt.stream.cancel()
                raise error
        streams = [
            FailoverStream(
                self._engine,
                single_sequence_request(self._request, sequence),
                attempt,
                known=[self._known[sequence][:]],
                failed_replicas=failed,
                failover_count=failover_count,
            )
            for sequence, attempt in zip(sequences, attempts, strict=True)
        ]
        return Attempt(MergedStream(streams, sequences), StreamState.SPLIT)

    async def _open_sequence(self, sequence: int, failed: tuple[str, ...], *, replay: bool = True) -> Attempt:
        """Open the rest of one sequence on another replica.

        The engine continues after the known tokens, which become a part of the prompt. If only a
        replay restores the engine's state, the sequence is generated again from its prompt,
        provided that the result is the same, or that the client has not seen the answer yet.

        Raises:
            UnavailableError: No replica can take the request, or a replay cannot restore the state
                of the request's grammar.
        """
        request, tokens = single_sequence_request(self._request, sequence), self._known[sequence]
        if not tokens:
            return Attempt(await self._open(request, failed))
        must_replay = replay and needs_replay(request)
        if must_replay and request.whole:
            return Attempt(await self._open(request, failed), restarts=True)
        replays = must_replay and is_deterministic(request)
        if request.guide is not None and not replays:
            raise UnavailableError("The answer was interrupted: its grammar's state is lost; send the request again.")
        stream = await self._open(request if replays else remaining_request(request, tokens), failed)
        exact = replays or (is_greedy(request) and not needs_replay(request))
        self._splices["exact" if exact and self._engine.exact else "approximate"] += 1
        return Attempt(stream, StreamState.REPLAYING if replays else StreamState.STREAMING)

    async def _open(self, request: EngineRequest, failed: tuple[str, ...], is_fresh: bool = False) -> TokenStream:
        """Open a request on a replica that has not failed on this request.

        If all have failed, use any replica except the last that failed. If no token has been
        generated (`is_fresh`), prefer a replica of another version to a replica that has failed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SEARCH_TIMEOUT
        exclusions = dict.fromkeys((frozenset(failed), frozenset(failed[-1:])))
        while True:
            for excluded in exclusions:
                try:
                    return await self._engine.reopen(replace(request, without=excluded, moved=True), is_fresh)
                except UnavailableError as error:
                    failure = error
            if self._engine.is_retired or loop.time() >= deadline:
                raise failure
            await asyncio.sleep(SEARCH_INTERVAL)

    def _enter(self, attempt: Attempt) -> None:
        """Read `attempt` from now on, instead of the previous attempt's stream."""
        self._held = deque(batch for batch in self._held if batch.restarts)
        self._search = self._replacement = None
        self._cached_tokens, self._verified = self.cached_tokens, 0
        if attempt.restarts and self._count_known():
            # this batch makes the reader discard its tokens
            self._known = [array("i")]
            self._held.append(TokenBatch(0, (), restarts=True))
        self._known_at_start = self._count_known()
        self._attempt, self._state = attempt, attempt.state
        if self._cancelled:
            attempt.stream.cancel()
        if not self._held:
            self._attach_sink()

    async def _interruptible(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await `work`. Raises CancelledStreamError if the stream is cancelled meanwhile."""
        self._search = asyncio.ensure_future(work)
        try:
            return await self._search
        except asyncio.CancelledError:
            if self._cancelled:
                raise CancelledStreamError from None
            raise
        finally:
            self._search = None

    def _end(self) -> None:
        self._state = StreamState.ENDED
        if self._search is not None:
            self._search.cancel()
            self._search = None
        if self._replacement is not None:
            self._replacement.stream.cancel()
            self._replacement = None
        self._attempt.stream.cancel()
        self._engine.streams.discard(self)


class FailoverEngine(Engine):
    """An engine whose token streams survive the loss of a replica."""

    def __init__(
        self,
        engine: Engine,
        count_failover: Callable[[FailoverReason], None],
        *,
        exact: bool,
        silence: float,
        version: str = "",
        fallback: Callable[[], Engine | None] = lambda: None,
    ) -> None:
        """Wrap `engine`, which chooses a replica for each request.

        Args:
            engine: The engine that opens requests. It must not use the replicas in
                `EngineRequest.without`.
            count_failover: Called with the reason of each failover.
            exact: True if the tokens of a request do not depend on the other requests in its batch.
            silence: Seconds without a token after which a stream leaves its replica.
            version: The version of the model that `engine` serves.
            fallback: Returns the engine of another version that can answer a request without
                generated tokens, or None.
        """
        self.version, self._fallback = version, fallback
        self.exact, self.gated = exact, engine.gated
        self.count_failover = count_failover
        self.streams: set[FailoverStream] = set()
        #: True once the engine gets no replicas any longer, so that no answer waits for one.
        self.is_retired = False
        self._engine, self._silence = engine, silence
        self._stall_check: asyncio.TimerHandle | None = None

    def check(self, turn: SchedulingParams) -> None:
        self._engine.check(turn)

    def has_waiting(self, turn: SchedulingParams) -> bool:
        return self._engine.has_waiting(turn)

    async def open(self, request: EngineRequest) -> TokenStream:
        stream = FailoverStream(self, request, Attempt(await self.reopen(request, is_fresh=True)))
        if self._stall_check is None:
            self._schedule_stall_check()
        return stream

    async def reopen(self, request: EngineRequest, is_fresh: bool = False) -> TokenStream:
        """Open a request for one of this engine's streams.

        If no token has been generated (`is_fresh`), the request may fall back to another version.

        Raises:
            UnavailableError: No replica can take the request.
        """
        try:
            return await self._engine.open(request)
        except OverloadedError:
            raise
        except UnavailableError:
            fallback = self._fallback() if is_fresh else None
            if fallback is None:
                raise
        return await fallback.open(request)

    def continue_stream(self, request: EngineRequest, known: array[int], cached: int | None) -> TokenStream:
        """Return the rest of an answer that another gateway, which is gone, has begun.

        Args:
            request: The request as the client sent it.
            known: The tokens of the answer that the other gateway has read.
            cached: Number of prompt tokens that the first replica found in its cache.
        """
        return FailoverStream(self, request, Attempt(_LostStream(cached, self.version)), known=[known])

    async def close(self) -> None:
        if self._stall_check is not None:
            self._stall_check.cancel()
        await self._engine.close()

    def leave(self, replica: str, reason: FailoverReason) -> None:
        """Continue all streams of `replica` on other replicas.

        A stream stays on its replica if no other replica takes it.
        """
        for stream in [stream for stream in self.streams if stream.replica == replica]:
            stream.leave(reason)

    def _schedule_stall_check(self) -> None:
        delay = self._silence / STALL_CHECKS_PER_TIMEOUT
        self._stall_check = asyncio.get_running_loop().call_later(delay, self._leave_stalled)

    def _leave_stalled(self) -> None:
        now = asyncio.get_running_loop().time()
        # a late timer means that this process was stopped, so the replica is not to blame
        if self._stall_check is not None and now - self._stall_check.when() < PROCESS_STALL_THRESHOLD:
            for stream in [stream for stream in self.streams if stream.is_stalled(now, self._silence)]:
                stream.leave(FailoverReason.NO_PROGRESS)
        self._stall_check = None
        if self.streams:
            self._schedule_stall_check()


class _GatewayLostError(UnavailableError):
    """The error of a stream whose gateway is gone."""


class _LostStream(TokenStream):
    """The stream that stands for the stream of a gateway that is gone."""

    def __init__(self, cached: int | None, version: str) -> None:
        self.cached_tokens, self.version = cached, version

    async def __anext__(self) -> TokenBatch:
        raise _GatewayLostError("The gateway that generated this answer is gone; send the request again.")

    def cancel(self) -> None:
        return


def _failover_reason(error: ApiError) -> FailoverReason:
    if isinstance(error, _GatewayLostError):
        return FailoverReason.GATEWAY_LOST
    if isinstance(error, DrainingError):
        return FailoverReason.DRAINING
    if isinstance(error, PreemptedError):
        return FailoverReason.PREEMPTED
    if error.code == "overloaded":
        return FailoverReason.QUEUE_FULL
    return FailoverReason.CONNECTION_LOST if isinstance(error, UnavailableError) else FailoverReason.ENGINE_FAILED


def _decline_batch(batch: TokenBatch) -> bool:
    return False
