"""Answers that go on elsewhere: whatever fails and whenever, the reader gets each token once, in its order."""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmops_engine.runtimes.script import Mixed

from llmops.gateway import interfaces
from llmops.gateway.errors import CancelledStreamError, DrainingError, EngineError, PreemptedError, UnavailableError
from llmops.gateway.generation.answer import StreamWatchdog
from llmops.gateway.interfaces import EngineRequest, Guide, SamplingParams, TokenBatch, TokenStream
from llmops.gateway.routing import failover
from llmops.gateway.routing.failover import MAX_FAILOVERS, FailoverEngine, FailoverStream
from llmops.gateway.routing.resubmission import remaining_request, single_sequence_request
from llmops.gateway.settings import Timeouts
from tests.fleet.views import settled
from tests.support.waiting import eventually

LOST = UnavailableError("Triton went away.")
GREEDY = SamplingParams(temperature=0)
END = 7


def answer(request: EngineRequest, sequence: int = 0, own: int = 0) -> list[int]:
    """Return the tokens that the engine generates.

    They are a function of the token ids for greedy requests. For others, they also depend on the
    seed, or on the engine's own one, and on the position.
    """
    ids, sampling = list(request.input_ids), request.sampling
    seed = own if sampling.seed is None else sampling.seed
    luck = [] if sampling.temperature == 0 else [(seed + sequence) % 2**31, len(ids)]
    tokens = list(islice(Mixed(range(10, 90)).after([*luck, *ids]), request.max_tokens))
    for at, token in enumerate(tokens):
        if token in request.end_ids and at + 1 >= request.min_tokens:
            return tokens[: at + 1]
    return tokens


class Slot(TokenStream):
    """A stream as a step stream's: batches wait for their reader, or go to its sink while it waits."""

    def __init__(self, engine: "Engine", request: EngineRequest) -> None:
        self.engine, self.request = engine, request
        self.batches: deque[TokenBatch] = deque()
        self.sink = None
        self.waiter: asyncio.Future | None = None
        self.error: Exception | None = None
        self.over = self.cancelled = False
        self.left = {at: answer(request, at, engine.luck) for at in range(request.n)}
        self.sent = 0

    @property
    def replica(self) -> str:
        return self.engine.name

    async def __anext__(self) -> TokenBatch:
        while not self.batches:
            if self.cancelled:
                raise CancelledStreamError
            if self.error is not None:
                raise self.error
            if self.over:
                raise StopAsyncIteration
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        return self.batches.popleft()

    def attach(self, sink, taken=None) -> None:
        self.sink, self.taken = sink, taken

    def cancel(self) -> None:
        self.cancelled = True
        self.batches.clear()
        self.engine.open.discard(self)
        self.wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.engine.open.discard(self)
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def step(self) -> None:
        """A token of each sequence."""
        for sequence, left in self.left.items():
            if left:
                token = left.pop(0)
                self.push(TokenBatch(sequence, [token], [-token / 100] if self.request.logprobs else None))
                if not left:
                    self.ended = {*self.ended, sequence}
        self.sent += 1
        if not any(self.left.values()):
            self.over = True
            self.engine.open.discard(self)
            self.wake()

    def push(self, batch: TokenBatch) -> None:
        if self.sink is not None and self.waiter is not None and not self.waiter.done() and self.sink(batch):
            if self.taken is not None:
                self.taken.append(batch)
            return
        self.batches.append(batch)
        self.wake()


@dataclass(eq=False)
class Engine:
    """One replica. `away`: what opening says; `silent`: it makes no tokens."""

    name: str
    open: set[Slot] = field(default_factory=set)
    asked: list[EngineRequest] = field(default_factory=list)
    away: Exception | None = None
    silent: bool = False
    luck: int = 0

    def start(self, request: EngineRequest) -> Slot:
        if self.away is not None:
            raise self.away
        self.asked.append(request)
        slot = Slot(self, request)
        self.open.add(slot)
        return slot

    def step(self) -> None:
        for slot in [] if self.silent else list(self.open):
            slot.step()

    def fail(self, error: Exception = LOST) -> None:
        for slot in list(self.open):
            slot.fail(error)


class Fleet(interfaces.Engine):
    """Engines that step when they are told to; requests go to the first that may be asked."""

    def __init__(self, count: int = 2, exact: bool = True, silence: float = 1000.0) -> None:
        self.engines = [Engine(f"r{at}") for at in range(count)]
        self.reasons: list[str] = []
        self.home = FailoverEngine(self, self.reasons.append, exact=exact, silence=silence)

    async def open(self, request: EngineRequest) -> TokenStream:
        for engine in self.engines:
            if engine.name not in request.without and engine.away is None:
                return engine.start(replace(request, without=frozenset(), moved=False))
        raise UnavailableError("No replica is ready.")

    async def run(self, reader: "Reader", steps: int = 10**6) -> None:
        """Until the reader is done."""
        while steps and not reader.task.done():
            steps -= 1
            await settled()
            for engine in self.engines:
                engine.step()
        await settled()

    async def lose(self, why: str) -> None:
        """The busiest engine fails, or is left while it goes on."""
        leaving = max(self.engines, key=lambda engine: len(engine.open))
        if why in ERRORS:
            leaving.fail(ERRORS[why])
        else:
            self.home.leave(leaving.name, why)
        await settled()


class Reader:
    """An answer that reads a stream.

    If `pushed`, it takes tokens by a sink once it has had its first.
    """

    def __init__(self, stream: TokenStream, pushed: bool = True) -> None:
        self.stream, self.pushed = stream, pushed
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: list[float] = []
        self.restarts = 0
        self.blocked = self.attached = False
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self.stream:
            self._take(batch)
            if self.pushed and not self.attached:
                self.attached = True
                self.stream.attach(self._sink)

    def _sink(self, batch: TokenBatch) -> bool:
        if not self.blocked:
            self._take(batch)
        return not self.blocked

    def _take(self, batch: TokenBatch) -> None:
        if batch.restarts:
            assert self.tokens.pop(batch.sequence), "of what was never begun"
            self.restarts += 1
        self.tokens.setdefault(batch.sequence, []).extend(batch.tokens)
        self.logprobs += batch.logprobs or []


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(failover, "SEARCH_TIMEOUT", 0.0)


def request(tokens: int = 20, **fields) -> EngineRequest:
    return EngineRequest("r", [1, 2, 3], tokens, **{"sampling": GREEDY, **fields})


async def read(fleet: Fleet, asked: EngineRequest, steps: int = 0, *, pushed: bool = True) -> Reader:
    """Begin to read an answer, of which the fleet makes so many steps."""
    reader = Reader(await fleet.home.open(asked), pushed)
    await fleet.run(reader, steps)
    return reader


async def read_on(fleet: Fleet, asked: EngineRequest) -> Reader:
    """Read an answer whose replica fails after six tokens."""
    reader = await read(fleet, asked, 6)
    fleet.engines[0].fail()
    await fleet.run(reader)
    return reader


async def read_of_a_draining(fleet: Fleet, steps: int = 0) -> Reader:
    """Read an answer whose replica drains after three tokens, while the other is away. It makes `steps` more."""
    fleet.engines[1].away = LOST
    reader = await read(fleet, request(), 3)
    fleet.home.leave("r0", "drain")
    await fleet.run(reader, steps)
    return reader


@pytest.fixture
def patient(monkeypatch) -> None:
    """A place is looked for without a pause, and for as long as it takes."""
    monkeypatch.setattr(failover, "SEARCH_TIMEOUT", 60.0)
    monkeypatch.setattr(failover, "SEARCH_INTERVAL", 0.0)


ERRORS = {
    "lost": LOST,
    "failed": EngineError("step failed"),
    "drain": DrainingError("The engine is shutting down."),
    "refused": UnavailableError("queue", code="overloaded"),
    "preempted": PreemptedError("The engine's memory is needed for others."),
}
EVENT = st.tuples(st.integers(0, 12), st.sampled_from([*ERRORS, "suspect"]), st.booleans())
EVENTS = st.lists(EVENT, min_size=1, max_size=MAX_FAILOVERS)
LIMITS = st.tuples(st.integers(1, 30), st.sampled_from([(), tuple(range(10, 30))]), st.integers(0, 12))


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.integers(1, 4), st.booleans(), LIMITS)
def test_whatever_happens_each_token_comes_once_and_in_order(events, n, pushed, limits) -> None:
    """Three replicas of which one at a time fails, or is left while it goes on; up to as often as an answer moves."""

    async def run() -> None:
        fleet, (tokens, end_ids, least) = Fleet(4), limits
        asked = request(tokens, n=n, end_ids=end_ids, min_tokens=min(least, tokens), logprobs=True)
        reader = await read(fleet, asked, pushed=pushed)
        for steps, why, block in events:
            reader.blocked = block
            await fleet.run(reader, steps)
            await fleet.lose(why)
        reader.blocked = False
        await fleet.run(reader)
        if reader.task.exception() is not None:
            # a request that ends one reader after the other before its first token is not passed on for ever
            assert isinstance(reader.task.exception(), UnavailableError | EngineError)
            assert sum(steps < 2 and why in ("lost", "failed") for steps, why, _ in events) >= 2
            return
        assert reader.tokens == {at: answer(asked, at) for at in range(n)}
        assert sorted(reader.logprobs) == sorted(-token / 100 for ids in reader.tokens.values() for token in ids)
        assert not any(engine.open for engine in fleet.engines)
        assert not fleet.home.streams

    asyncio.run(run())


async def test_the_rest_is_asked_for_with_what_is_left_of_every_limit() -> None:
    fleet = Fleet()
    asked = request(20, min_tokens=9, end_ids=(5,), logprobs=True, caller="a/b", cache_salt=7)
    reader = await read_on(fleet, asked)
    (rest,) = fleet.engines[1].asked
    assert rest.input_ids == [1, 2, 3, *answer(asked)[:6]]
    assert (rest.max_tokens, rest.min_tokens, rest.end_ids, rest.logprobs) == (14, 3, (5,), True)
    assert (rest.caller, rest.cache_salt, rest.sampling) == ("a/b", 7, GREEDY)
    assert (fleet.reasons, dict(reader.stream.splices)) == (["lost"], {"exact": 1})


async def test_where_it_failed_it_is_not_asked_again_unless_there_is_nowhere_else() -> None:
    fleet = Fleet(2)
    reader = await read(fleet, request(20))
    for at in (0, 1, 0):
        await fleet.run(reader, 3)
        fleet.engines[at].fail()
        await settled()
        assert [len(engine.open) for engine in fleet.engines] == [at, 1 - at]
    await fleet.run(reader, 3)
    fleet.engines[1].fail()
    await fleet.run(reader)
    assert reader.task.exception() is LOST
    assert fleet.reasons == ["lost"] * MAX_FAILOVERS


async def test_who_makes_room_for_others_may_do_so_as_often_as_it_takes() -> None:
    fleet = Fleet(1)
    reader = await read(fleet, request(20))
    for _ in range(MAX_FAILOVERS + 2):
        await fleet.run(reader, 3)
        fleet.engines[0].fail(ERRORS["preempted"])
    await fleet.run(reader)
    assert (reader.tokens, fleet.reasons) == ({0: answer(request(20))}, ["preempted"] * (MAX_FAILOVERS + 2))


async def test_a_request_that_ends_whoever_reads_it_is_not_passed_on_to_everybody() -> None:
    fleet = Fleet(4)
    reader = await read(fleet, request())
    for engine in fleet.engines:
        engine.fail()
        await settled()
    assert reader.task.exception() is LOST
    assert [len(engine.asked) for engine in fleet.engines] == [1, 1, 0, 0]


async def test_of_the_prompt_was_cached_what_the_first_replica_had_of_it() -> None:
    fleet = Fleet()
    asked = request(20, n=2)
    for tokens, cached in ((0, 1000), (6, 3)):
        reader = await read(fleet, asked)
        (slot,) = fleet.engines[0].open
        slot.cached_tokens = 3
        await fleet.run(reader, tokens)
        fleet.engines[0].fail()
        await settled()
        for one in fleet.engines[1].open:
            one.cached_tokens = 1000
        await fleet.run(reader)
        assert reader.stream.cached_tokens == cached


async def test_a_last_token_whose_end_was_lost_is_an_end() -> None:
    for asked in (request(6), request(20, end_ids=(answer(request(20))[5],))):
        fleet = Fleet()
        reader = await read(fleet, asked)
        (slot,) = fleet.engines[0].open
        for token in answer(asked):
            slot.push(TokenBatch(0, [token]))
            await settled()
        slot.fail(LOST)
        await fleet.run(reader)
        assert reader.task.exception() is None
        assert (reader.tokens, fleet.engines[1].asked) == ({0: answer(asked)}, [])


# -- leaving a replica that still answers ----------------------------------------------------------------------------
async def test_a_replica_that_drains_keeps_what_nobody_else_takes() -> None:
    fleet = Fleet(2)
    reader = await read_of_a_draining(fleet)
    await fleet.run(reader)
    assert (reader.tokens, fleet.reasons) == ({0: answer(request())}, [])


async def test_one_that_drains_is_left_as_soon_as_there_is_a_place(patient) -> None:
    fleet = Fleet(2)
    reader = await read_of_a_draining(fleet, 4)
    # what it still makes is kept back, in case that it is needed
    assert reader.tokens == {0: answer(request())[:3]}
    fleet.engines[1].away = None
    await settled()
    assert (len(fleet.engines[0].open), len(fleet.engines[1].open)) == (0, 1)
    await fleet.run(reader)
    assert reader.tokens == {0: answer(request())}


async def test_what_was_kept_back_comes_first_when_there_is_no_place_after_all(patient, monkeypatch) -> None:
    fleet = Fleet(2)
    reader = await read_of_a_draining(fleet, 4)
    assert reader.tokens == {0: answer(request())[:3]}

    monkeypatch.setattr(fleet, "open", AsyncMock(side_effect=EngineError("not here")))
    await fleet.run(reader, 3)
    assert reader.tokens == {0: answer(request())[:10]}
    (slot,) = fleet.engines[0].open
    assert slot.sink == reader._sink
    await fleet.run(reader)
    assert reader.tokens == {0: answer(request())}


async def test_one_that_was_silent_and_comes_back_first_is_believed() -> None:
    fleet = Fleet(2)
    fleet.engines[1].away = LOST
    reader = await read(fleet, request(), 3)
    fleet.home.leave("r0", "suspect")
    await settled()
    await fleet.run(reader)
    assert reader.tokens == {0: answer(request())}


async def test_a_running_slot_without_tokens_is_suspected_and_a_slow_reader_is_not() -> None:
    fleet = Fleet(2, silence=0.02)
    silent, slow = await read(fleet, request()), await read(fleet, request(), pushed=False)
    await fleet.run(silent, 3)
    slow._take = lambda batch: None  # type: ignore[method-assign]
    slow.task.cancel()
    start = fleet.engines[1].start

    def patient(one: EngineRequest) -> Slot:
        fleet.home._silence = 1000.0
        return start(one)

    fleet.engines[1].start = patient  # type: ignore[method-assign]
    fleet.engines[0].silent = True
    await eventually(lambda: fleet.engines[1].asked)
    await fleet.run(silent)
    assert silent.tokens == {0: answer(request())}
    assert (fleet.reasons, len(fleet.engines[1].asked)) == (["suspect"], 1)


async def test_an_answer_with_all_its_tokens_ends_although_its_engine_never_says_so() -> None:
    fleet = Fleet(2, silence=0.02)
    reader = await read(fleet, request(), 19)
    (slot,) = fleet.engines[0].open
    slot.push(TokenBatch(0, slot.left[0]))
    await eventually(reader.task.done)
    assert (reader.tokens, fleet.engines[1].asked) == ({0: answer(request())}, [])


async def test_a_gateway_that_was_held_up_suspects_nobody_for_it(monkeypatch) -> None:
    monkeypatch.setattr(failover, "PROCESS_STALL_THRESHOLD", 0.0)  # every look comes too late
    fleet = Fleet(2, silence=0.02)
    reader = await read(fleet, request(), 3)
    fleet.engines[0].silent = True
    await asyncio.sleep(0.1)
    assert fleet.reasons == []
    monkeypatch.setattr(failover, "PROCESS_STALL_THRESHOLD", 60.0)
    await eventually(lambda: fleet.reasons)
    reader.task.cancel()


async def test_nobody_is_suspected_before_the_first_token() -> None:
    fleet = Fleet(2)
    reader = await read(fleet, request())
    stream: FailoverStream = reader.stream  # type: ignore[assignment]
    assert [stream.is_stalled(at, 5.0) for at in (0.0, 100.0)] == [False, False]
    await fleet.run(reader, 1)
    assert [stream.is_stalled(at, 5.0) for at in (100.0, 104.9, 105.0)] == [False, False, True]
    await fleet.run(reader, 1)
    assert not stream.is_stalled(200.0, 5.0)
    reader.task.cancel()


async def test_the_client_leaves_while_a_place_is_looked_for(patient) -> None:
    for why in ("lost", "drain"):
        fleet = Fleet(2)
        fleet.engines[1].away = LOST
        reader = await read(fleet, request(), 3)
        await fleet.lose(why)
        reader.stream.cancel()
        await settled()
        assert isinstance(reader.task.exception(), CancelledStreamError)
        assert [*fleet.engines[0].open, *fleet.home.streams] == []


# -- several sequences -----------------------------------------------------------------------------------------------
async def test_each_unfinished_sequence_goes_on_by_itself_and_moves_by_itself() -> None:
    fleet = Fleet(3)
    asked = request(20, n=3, sampling=SamplingParams(seed=5))
    reader = await read(fleet, asked, 4)
    before = {at: list(ids) for at, ids in reader.tokens.items()}
    assert before == {at: answer(asked, at)[:4] for at in range(3)}
    fleet.engines[0].fail()
    await fleet.run(reader, 3)
    rests = fleet.engines[1].asked
    assert rests == [remaining_request(single_sequence_request(asked, at), before[at]) for at in range(3)]
    assert [one.request_id for one in rests] == ["r-0", "r-1", "r-2"]
    fleet.engines[1].fail()
    await fleet.run(reader)
    assert {at: len(ids) for at, ids in reader.tokens.items()} == {0: 20, 1: 20, 2: 20}
    assert dict(reader.stream.splices) == {"approximate": 6}
    # a split is one move, then each moves alone
    assert fleet.reasons == ["lost"] * 4


def test_a_sequence_alone_draws_as_it_would_have_beside_the_others_and_differently_after_a_seam() -> None:
    asked = request(20, n=3, sampling=SamplingParams(seed=2**64 - 1))
    assert [single_sequence_request(asked, at).sampling.seed for at in range(3)] == [2**64 - 1, 0, 1]
    alone = [single_sequence_request(asked, at) for at in range(3)]
    assert len({remaining_request(one, [1] * done).sampling.seed for one in alone for done in range(1, 50)}) == 3 * 49
    assert remaining_request(request(20), [1]).sampling == GREEDY


# -- grammars and what else a prompt does not bring back --------------------------------------------------------------
GUIDE = Guide("json")


FIELDS = [{"guide": GUIDE}, {"guide": GUIDE, "sampling": SamplingParams(seed=3)}]
FIELDS += [{"sampling": SamplingParams(temperature=0, **{f"{of}_penalty": 0.5})} for of in ("presence", "frequency")]


@pytest.mark.parametrize("fields", [*FIELDS, {"stop_words": ((98, 99),)}, {"bad_words": ((98, 99),)}])
@pytest.mark.parametrize("n", [1, 2])
async def test_what_a_prompt_does_not_bring_back_is_made_again_and_compared(fields, n) -> None:
    fleet = Fleet()
    asked = request(20, n=n, **fields)
    reader = await read_on(fleet, asked)
    assert fleet.engines[1].asked == [single_sequence_request(asked, at) for at in range(n)]
    assert (reader.tokens, dict(reader.stream.splices)) == ({at: answer(asked, at) for at in range(n)}, {"exact": n})


async def test_a_replay_that_comes_in_larger_pieces_is_cut_where_it_is_new() -> None:
    fleet = Fleet()
    asked = request(20, guide=GUIDE, logprobs=True)
    reader = await read(fleet, asked, 6)
    fleet.engines[0].fail()
    await settled()
    (slot,) = fleet.engines[1].open
    tokens = slot.left.pop(0)
    for start in range(0, 20, 4):
        some = tokens[start : start + 4]
        slot.push(TokenBatch(0, some, [-one / 100 for one in some]))
        await settled()
    await fleet.run(reader)
    assert (reader.tokens, reader.logprobs) == ({0: answer(asked)}, [-one / 100 for one in answer(asked)])
    assert reader.task.exception() is None


async def test_a_sequence_that_the_engine_called_ended_is_not_asked_for_again() -> None:
    """An engine may end a sequence without sending the token that ended it."""
    fleet = Fleet()
    asked = request(20, n=2)
    reader = await read(fleet, asked)
    (slot,) = fleet.engines[0].open
    del slot.left[1][3:]
    await fleet.run(reader, 6)
    fleet.engines[0].fail()
    await fleet.run(reader)
    assert (reader.tokens, len(fleet.engines[1].asked)) == ({0: answer(asked, 0), 1: answer(asked, 1)[:3]}, 1)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_nobody_has_seen_begins_anew(n) -> None:
    fleet = Fleet()
    fleet.engines[1].luck = 40
    asked = request(20, n=n, guide=GUIDE, sampling=SamplingParams(), whole=True)
    reader = await read(fleet, asked, 6, pushed=False)
    assert reader.tokens == {at: answer(asked, at)[:6] for at in range(n)}
    fleet.engines[0].fail()
    await fleet.run(reader)
    assert fleet.engines[1].asked == [single_sequence_request(asked, at) for at in range(n)]
    assert reader.tokens == {at: answer(single_sequence_request(asked, at), 0, 40) for at in range(n)}
    assert (reader.restarts, dict(reader.stream.splices)) == (n, {})


async def test_an_answer_that_begins_anew_stays_where_it_is_until_there_is_a_place(monkeypatch) -> None:
    fleet = Fleet()
    asked = request(20, guide=GUIDE, sampling=SamplingParams(), whole=True)
    reader = await read(fleet, asked, 6, pushed=False)
    fleet.engines[1].away = UnavailableError("It drains, too.")
    fleet.home.leave("r0", "drain")
    await fleet.run(reader)
    assert (reader.tokens, reader.restarts) == ({0: answer(asked)}, 0)


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(1, 30))
def test_whatever_happens_a_whole_answer_is_that_of_one_replica(events, n, tokens) -> None:
    async def run() -> None:
        fleet = Fleet(4)
        for at, engine in enumerate(fleet.engines):
            engine.luck = 100 * at
        asked = request(tokens, n=n, guide=GUIDE, sampling=SamplingParams(), whole=True)
        reader = await read(fleet, asked, pushed=False)
        for steps, why, _ in events:
            await fleet.run(reader, steps)
            await fleet.lose(why)
        await fleet.run(reader)
        if reader.task.exception() is not None:
            assert sum(why in ("lost", "failed") for _, why, _ in events) >= 2
            return
        for at in range(n):
            ways = [(single_sequence_request(asked, at), 0), (asked, at)]
            assert reader.tokens[at] in [answer(*way, engine.luck) for way in ways for engine in fleet.engines]
        assert not any(engine.open for engine in fleet.engines)
        assert not fleet.home.streams

    asyncio.run(run())


async def test_a_grammar_that_cannot_be_made_again_ends_with_today_s_error() -> None:
    fleet = Fleet()
    assert (await read_on(fleet, request(20, guide=GUIDE, sampling=SamplingParams()))).task.exception() is LOST
    assert fleet.engines[1].asked == []


@pytest.mark.parametrize("shorter", [False, True])
@pytest.mark.parametrize("guided", [False, True])
async def test_a_replay_that_is_not_the_same(guided, shorter, monkeypatch) -> None:
    """A grammar is lost then; a penalty goes on with a little less of itself, and the client is told."""
    fleet = Fleet(exact=True)
    penalised = SamplingParams(temperature=0, presence_penalty=1)
    asked = request(20, guide=GUIDE) if guided else request(20, sampling=penalised)
    reader = await read(fleet, asked, 6)
    start = fleet.engines[1].start

    def other(one: EngineRequest) -> Slot:
        slot = start(one)
        if one == asked:
            slot.left[0] = slot.left[0][:4] if shorter else [*slot.left[0][:4], 99, *slot.left[0][5:]]
        return slot

    monkeypatch.setattr(fleet.engines[1], "start", other)
    fleet.engines[0].fail()
    await fleet.run(reader)
    known = answer(asked)
    if guided:
        assert isinstance(reader.task.exception(), UnavailableError)
        assert reader.tokens == {0: known[:6]}
    else:
        assert reader.tokens == {0: [*known[:6], *answer(remaining_request(asked, known[:6]))]}
        assert dict(reader.stream.splices) == {"approximate": 1}
    assert not any(engine.open for engine in fleet.engines)


async def test_nothing_is_late_while_an_answer_looks_for_a_place(monkeypatch) -> None:
    monkeypatch.setattr(failover, "SEARCH_TIMEOUT", 60.0)
    fleet = Fleet(2)
    reader = await read(fleet, request(), 3)
    watch = StreamWatchdog(reader.stream, SimpleNamespace(last=perf_counter()), Timeouts(idle="20ms"))
    fleet.engines[0].away = fleet.engines[1].away = LOST
    fleet.engines[0].fail()
    await asyncio.sleep(0.2)
    assert (reader.stream.is_failing_over, watch.expired) == (True, None)
    fleet.engines[1].away = None
    await eventually(lambda: watch.expired is not None)
    # it has a place now, and makes nothing there
    assert len(fleet.engines[1].asked) == 1
    await settled()
    assert isinstance(reader.task.exception(), CancelledStreamError)
