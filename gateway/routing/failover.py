"""An answer that goes on elsewhere when its replica cannot finish it: from the prompt and the tokens so far.

One mechanism for a crash, a drain, a suspicion and a preemption (docs/fleet.md, "When a replica dies").
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol

from llmops.gateway.errors import (
    ApiError,
    CancelledStreamError,
    DrainingError,
    EngineError,
    PreemptedError,
    UnavailableError,
)
from llmops.gateway.interfaces import EngineRequest, Failover, TokenBatch, TokenSink, TokenStream
from llmops.gateway.routing.merged_stream import MergedStream
from llmops.gateway.routing.resubmission import (
    has_finished,
    is_deterministic,
    is_greedy,
    needs_replay,
    remaining_request,
    single_sequence_request,
)

log = logging.getLogger(__name__)

# of one sequence, whatever the reasons; those that go because others go first do not count: it is no fault of theirs
MAX_FAILOVERS = 3
# the last ones, of which traces tell: whoever makes room again and again is moved any number of times
MAX_RECORDED_FAILOVERS = 16
# replicas that may fail without a token of it: a request that ends whoever reads it is not passed on to the next
MAX_FAILURES_WITHOUT_PROGRESS = 2
# how long a sequence looks for a place while there is none, and how often (s)
SEARCH_TIMEOUT, SEARCH_INTERVAL = 10.0, 0.2

# crash or broken stream; the engine failed on it; its queue was full; it shuts down; nothing comes; others go first
FailoverReason = Literal["lost", "failed", "refused", "drain", "suspect", "preempted"]


class FailoverHost(Protocol):
    """What a stream that may have to move needs of the fleet. `exact`: results do not depend on the batch."""

    exact: bool

    async def place(self, request: EngineRequest) -> TokenStream:
        """Open it on a replica. Raises UnavailableError when there is none for it."""
        ...

    def joined(self, stream: FailoverStream) -> None: ...

    def left(self, stream: FailoverStream) -> None: ...

    def moved(self, reason: FailoverReason) -> None: ...


class _Attempt(NamedTuple):
    """A part of the way. `sequence`: whose tokens these are, None where the stream itself says so; `again`: it began
    from the prompt alone, and what is known already is left out; `anew`: the same, and what is known is forgotten;
    `parts`: of these each moves by itself."""

    stream: TokenStream
    sequence: int | None = None
    again: bool = False
    anew: bool = False
    parts: bool = False


class _ReplayDivergedError(Exception):
    """A replay gave another token than was sent."""


class FailoverStream(TokenStream):
    """One request's tokens, wherever they come from."""

    def __init__(
        self,
        home: FailoverHost,
        request: EngineRequest,
        stream: TokenStream,
        kept: Sequence[array[int]] | None = None,
        failed: tuple[str, ...] = (),
        moves: int = 0,
    ) -> None:
        """`kept`, `failed`, `moves`: of what came before, where this is a sequence that left others."""
        self._home, self._request = home, request
        self._leg = _Attempt(stream)
        # what the reader has: what came since somebody looked, and all before, four bytes per token
        self._recent: list[TokenBatch] = []
        self._kept = kept or [array("i") for _ in range(request.n)]
        self._failed, self._moves, self._in_vain = failed, moves, 0
        # sequences that the engine called ended before it was left
        self._done: set[int] = set()
        self._cached: int | None = None
        self._seams: dict[str, int] = {}
        self._went: tuple[Failover, ...] = ()
        self._sink: TokenSink | None = None
        self._verified = 0
        self._cancelled = self._over = False
        # while it moves from a replica that still answers: why, what does it, what came meanwhile, where it goes
        self._moving: FailoverReason | None = None
        self._work: asyncio.Task | None = None
        self._held: deque[TokenBatch] = deque()
        self._next: _Attempt | None = None
        # of the watch for silence: whether the reader waits, what was known when this replica began, and last, and when
        self._waits = False
        self._before = self._known
        self._mark = (0, 0.0)
        home.joined(self)

    @property
    def replica(self) -> str:
        """Where it is now; empty while its sequences go apart."""
        return self._leg.stream.replica

    @property
    def cached_tokens(self) -> int | None:  # type: ignore[override]
        """Of the first replica: what a seam costs is nobody's but ours."""
        return self._cached if self._before else self._leg.stream.cached_tokens

    @property
    def _known(self) -> int:
        """How many tokens the reader has. All of them are in `_kept` then."""
        for sequence in {batch.sequence for batch in self._recent}:
            tokens = [token for batch in self._recent if batch.sequence == sequence for token in batch.tokens]
            self._kept[sequence].extend(array("i", tokens))
        self._recent.clear()
        return sum(map(len, self._kept))

    @property
    def is_failing_over(self) -> bool:
        return self._work is not None or (self._leg.parts and self._leg.stream.is_failing_over)

    @property
    def moves(self) -> Sequence[Failover]:
        return [*self._went, *self._leg.stream.moves] if self._leg.parts else self._went

    @property
    def splices(self) -> Mapping[str, int]:
        parts = self._leg.stream.splices if self._leg.parts else {}
        return {kind: self._seams.get(kind, 0) + parts.get(kind, 0) for kind in {*self._seams, *parts}}

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        self._sink = sink
        self._join_sink()

    async def __anext__(self) -> TokenBatch:
        self._waits = True
        try:
            while (batch := await self._read()) is None:
                pass
            if not self._leg.parts:
                self._recent.append(batch)
            return batch
        except ApiError:
            self._end()
            raise
        finally:
            self._waits = False

    def move(self, reason: FailoverReason) -> None:
        """Go on elsewhere. Until there is a place the replica keeps its work, in case that it is the last."""
        if self._over or self._moving or self._leg.parts or self._work is not None or self._moves >= MAX_FAILOVERS:
            return
        self._moving = reason
        # what comes from now on goes to the reader, who keeps it back
        self._leg.stream.attach(_decline_batch)
        self._work = asyncio.create_task(self._prepare(reason))

    def silent(self, now: float, seconds: float) -> bool:
        """Whether its reader has waited for `seconds` for tokens that had begun to come. To be asked every now and
        then: time counts from the first time that nothing new is seen."""
        known = self._known
        if not self._waits or known == self._before or self._moving or self._leg.parts or known != self._mark[0]:
            self._mark = (known, now)
        return now - self._mark[1] >= seconds

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._end()

    # -- reading ------------------------------------------------------------------------------------------------------
    async def _read(self) -> TokenBatch | None:
        """What came next; None when something else happened than tokens for the reader."""
        if self._held and not self._moving:
            batch = self._held.popleft()
            if not self._held:
                self._join_sink()
            return batch
        if self._over:
            raise CancelledStreamError if self._cancelled else StopAsyncIteration
        try:
            came = await self._leg.stream.__anext__()
            news = self._news(came) if self._leg.again else came
        except StopAsyncIteration:
            if self._leg.again:
                await self._after_divergence()
            else:
                self._ended()
            return None
        except CancelledStreamError:
            if self._next is None:
                raise
            self._enter(self._next)
            return None
        except (UnavailableError, EngineError) as error:
            await self._recover(error)
            return None
        except _ReplayDivergedError:
            await self._after_divergence()
            return None
        if news is not None and self._leg.sequence is not None:
            news = news._replace(sequence=self._leg.sequence)
        if news is not None and (self._moving or self._held):
            self._held.append(news)
            return None
        return news

    def _news(self, batch: TokenBatch) -> TokenBatch | None:
        """Of a replay what is not known already. Raises _ReplayDivergedError when the rest is not the same."""
        sequence = self._leg.sequence or 0
        known = self._kept[sequence][self._verified : self._verified + len(batch.tokens)]
        if known.tolist() != list(batch.tokens[: len(known)]):
            raise _ReplayDivergedError
        self._verified += len(known)
        if self._verified == len(self._kept[sequence]):
            self._leg = self._leg._replace(again=False)
            self._join_sink()
        if len(known) == len(batch.tokens):
            return None
        logprobs = None if batch.logprobs is None else batch.logprobs[len(known) :]
        tops = None if batch.tops is None else batch.tops[len(known) :]
        return TokenBatch(batch.sequence, batch.tokens[len(known) :], logprobs, tops=tops)

    def _join_sink(self) -> None:
        sink, sequence = self._sink, self._leg.sequence
        if sink is None or self._leg.again:
            return
        if sequence is None:
            self._leg.stream.attach(sink, self._recent)
        else:
            # of several sequences the last one: the replica calls it its first
            self._leg.stream.attach(lambda batch: self._take_as(sink, batch, sequence))

    def _take_as(self, sink: TokenSink, batch: TokenBatch, sequence: int) -> bool:
        renamed = batch._replace(sequence=sequence)
        taken = sink(renamed)
        if taken:
            self._recent.append(renamed)
        return taken

    def _ended(self) -> None:
        """The engine is done with it."""
        self._stop_moving()
        self._over = True
        self._home.left(self)

    # -- going on elsewhere -------------------------------------------------------------------------------------------
    async def _recover(self, error: ApiError) -> None:
        """The replica failed: `error` is told when nobody else can go on."""
        if self._leg.parts:
            raise error
        if self._work is not None:
            # on its way already
            await asyncio.wait({self._work})
            if self._cancelled:
                raise CancelledStreamError
            if self._next is not None:
                self._enter(self._next)
                return
        await self._go(_failover_reason(error), error)

    async def _go(self, reason: FailoverReason, error: ApiError) -> None:
        self._in_vain = self._in_vain + 1 if self._known == self._before and reason in ("lost", "failed") else 0
        if (self._moves >= MAX_FAILOVERS and reason != "preempted") or self._in_vain >= MAX_FAILURES_WITHOUT_PROGRESS:
            raise error
        try:
            leg = await self._interruptible(self._elsewhere(reason))
        except CancelledStreamError:
            raise
        except ApiError as nowhere:
            log.warning("an answer could not be continued on another replica: %s", nowhere.told)
            raise error from None
        if leg is None:
            self._held.clear()
            self._ended()
        else:
            self._enter(leg)

    async def _prepare(self, reason: FailoverReason) -> None:
        """Find a place while the replica still has its work, then have it stop."""
        try:
            self._next = await self._elsewhere(reason)
        except ApiError as error:
            log.info("an answer stays where it is: %s", error.told)
        except Exception:
            # a bug must not keep back what comes
            log.exception("an answer stays where it is")
        if self._next is not None:
            self._leg.stream.cancel()
        else:
            self._stop_moving()
            if not self._held:
                self._join_sink()

    def _stop_moving(self) -> None:
        """Nothing comes of it: what was kept back is the reader's."""
        work, self._work, self._moving = self._work, None, None
        if work is not None and work is not asyncio.current_task():
            work.cancel()
        if self._next is not None:
            self._next.stream.cancel()
            self._next = None

    async def _elsewhere(self, reason: FailoverReason) -> _Attempt | None:
        """Open what is left, each sequence for itself where several have begun; None when nothing is left."""
        began, request, old, known = perf_counter(), self._request, self._leg, self._known
        if old.sequence is None:
            self._done.update(old.stream.ended)
        left = [at for at in range(request.n) if at not in self._done and not has_finished(request, self._kept[at])]
        if not left:
            return None
        failed = self._failed if reason == "preempted" else (*self._failed, old.stream.replica)
        if not known:
            leg = _Attempt(await self._open(request, failed))
        elif len(left) == 1:
            leg = await self._open_one(left[0], failed)
        else:
            leg = await self._open_all(left, failed)
        self._failed, self._moves = failed, self._moves + (reason != "preempted")
        move = Failover(reason, old.stream.replica, leg.stream.replica, began, perf_counter())
        self._went = (*self._went, move)[-MAX_RECORDED_FAILOVERS:]
        self._home.moved(reason)
        return leg

    async def _open_one(self, sequence: int, failed: tuple[str, ...], plainly: bool = False) -> _Attempt:
        request, kept = single_sequence_request(self._request, sequence), self._kept[sequence]
        own = sequence if self._request.n > 1 else None
        lost = not plainly and bool(kept) and needs_replay(request)
        if lost and request.whole:
            return _Attempt(await self._open(request, failed), own, anew=True)
        again = lost and is_deterministic(request)
        if not again and kept and request.guide is not None:
            raise UnavailableError("The state of a grammar cannot be moved.")
        asked = request if again else remaining_request(request, kept)
        stream = await self._open(asked, failed)
        exact = again or (is_greedy(request) and not needs_replay(request))
        self._note("exact" if exact and self._home.exact else "approximate")
        self._verified = 0
        return _Attempt(stream, own, again)

    async def _open_all(self, left: Sequence[int], failed: tuple[str, ...]) -> _Attempt:
        parts = [self._part(at, failed) for at in left]
        opened = await asyncio.gather(*(part._start() for part in parts), return_exceptions=True)
        errors = [error for error in opened if isinstance(error, BaseException)]
        if errors:
            for part in parts:
                part.cancel()
            raise errors[0]
        return _Attempt(MergedStream(parts, left), parts=True)

    def _part(self, sequence: int, failed: tuple[str, ...]) -> FailoverStream:
        """A sequence that goes its own way from here."""
        request = single_sequence_request(self._request, sequence)
        return FailoverStream(self._home, request, _UnopenedStream(), [self._kept[sequence]], failed, self._moves + 1)

    async def _start(self) -> None:
        if self._kept[0]:
            self._enter(await self._open_one(0, self._failed))
        else:
            self._enter(_Attempt(await self._open(self._request, self._failed)))

    async def _open(self, request: EngineRequest, failed: tuple[str, ...]) -> TokenStream:
        """Anywhere but where it failed, or at least not where it failed last."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SEARCH_TIMEOUT
        without = [frozenset(failed), frozenset(failed[-1:])]
        while True:
            for most in dict.fromkeys(without):
                try:
                    return await self._home.place(replace(request, without=most, moved=True))
                except UnavailableError as error:
                    nowhere = error
            if loop.time() >= until:
                raise nowhere
            await asyncio.sleep(SEARCH_INTERVAL)

    async def _after_divergence(self) -> None:
        """A replay is not the same answer: a grammar's state is lost, other requests go on without one."""
        self._leg.stream.cancel()
        sequence = self._leg.sequence or 0
        if self._request.guide is not None:
            raise UnavailableError(
                "The answer could not be continued on another replica: its grammar's state was lost."
            )
        self._seams.pop("exact", None)
        self._enter(await self._interruptible(self._open_one(sequence, self._failed, plainly=True)))

    def _enter(self, leg: _Attempt) -> None:
        """From here on the tokens are those of `leg`."""
        self._held = deque(batch for batch in self._held if batch.anew)
        self._work, self._moving, self._next = None, None, None
        self._cached = self.cached_tokens
        if leg.anew:
            self._forget(leg.sequence or 0)
        self._before = self._known
        self._leg = leg
        if self._cancelled:
            leg.stream.cancel()
        self._join_sink()

    def _forget(self, sequence: int) -> None:
        """Nobody has seen what came of it; its reader is the first to hear that it does not count."""
        if self._known:
            del self._kept[sequence][:]
            self._held.append(TokenBatch(sequence, (), anew=True))

    def _note(self, kind: str) -> None:
        self._seams[kind] = self._seams.get(kind, 0) + 1

    async def _interruptible(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Raises CancelledStreamError when the client leaves meanwhile."""
        self._work = asyncio.ensure_future(work)
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._cancelled:
                raise CancelledStreamError from None
            raise
        finally:
            self._work = None

    def _end(self) -> None:
        self._over = True
        work = self._work
        self._stop_moving()
        if work is not None:
            work.cancel()
        self._leg.stream.cancel()
        self._home.left(self)


class _UnopenedStream(TokenStream):
    """In the place of a stream that is not open yet."""

    async def __anext__(self) -> TokenBatch:
        raise StopAsyncIteration

    def cancel(self) -> None:
        return


def _failover_reason(error: ApiError) -> FailoverReason:
    if isinstance(error, DrainingError):
        return "drain"
    if isinstance(error, PreemptedError):
        return "preempted"
    if error.code == "overloaded":
        return "refused"
    return "lost" if isinstance(error, UnavailableError) else "failed"


def _decline_batch(batch: TokenBatch) -> bool:
    return False
