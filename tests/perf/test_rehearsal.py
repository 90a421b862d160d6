"""The report of a rehearsal, and the faults that it plants."""

import time
from types import SimpleNamespace

from llmops.gateway.interfaces import Engine, EngineRequest, TokenBatch, TokenStream
from llmops.perf.planted_faults import PLANTED_ERROR, FaultyEngine
from llmops.perf.rehearsal import RehearsedRequest, lowest_throughput_ratio, make_report


def steady(seconds: int, without: range = range(0)) -> list[RehearsedRequest]:
    """One request a second, answered in a second, with errors in some."""
    errors = ["broken" if at in without else "" for at in range(seconds)]
    return [RehearsedRequest(float(at), at + 1.0, "initial", error, 12) for at, error in enumerate(errors)]


def test_the_worst_window_is_the_one_without_answers():
    assert lowest_throughput_ratio(steady(120))[0] == 1.0
    # 10 of 40 requests
    ratio, worst = lowest_throughput_ratio(steady(120, range(60, 70)))
    assert ratio == 0.75
    assert 45 <= worst <= 85


def test_the_report_counts_what_a_rollout_must_not_do():
    records = steady(100)
    records[3].error = "HTTP 503"
    records[4].tokens = 14
    records[60] = RehearsedRequest(60.0, 61.0, "candidate", PLANTED_ERROR, 3)
    records[72] = RehearsedRequest(72.0, 73.0, "candidate", "", 12)
    states = {"starting": 10.0, "shifting": 50.0, "rolling back": 70.5, "rolled back": 80.0}
    measured = {"rate": 1.0, "capacity": {"old": 2.5, "new": 3.0}, "quality": {"old": 0.8, "new": 0.75}}
    report = make_report(records, states, reason="errors", fault="errors", quality_tolerance=0.05, **measured)
    assert report.verdict == "rolled back"
    assert (report.requests, report.failed, report.failed_by_fault, report.doubled_tokens) == (100, 2, 1, 2)
    assert report.lowest_while in ("before", "starting", "shifting")
    assert (report.seconds_to_verdict, report.canary_requests, report.seconds_to_rollback) == (20.5, 1, 1.5)


class Stream(TokenStream):
    version, cached_tokens = "canary", 3

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    async def __anext__(self) -> TokenBatch:
        if not self._tokens:
            raise StopAsyncIteration
        return TokenBatch(0, [self._tokens.pop(0)])

    def cancel(self) -> None: ...


class Pool(Engine):
    """A pool with one replica, whose tokenizer knows three Thai tokens."""

    def __init__(self) -> None:
        tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [7, 8, 9])
        model = SimpleNamespace(card=SimpleNamespace(vocab_size=1000), tokenizer=tokenizer)
        self.replicas = {"a": SimpleNamespace(model=model)}

    async def open(self, request: EngineRequest) -> TokenStream:
        self.seen = request.input_ids
        return Stream([500, 501, 502, 2])


async def answer(fault: str) -> list[int]:
    stream = await FaultyEngine(Pool(), fault, lambda: 0.01).open(EngineRequest("1", [1], 4, end_ids=(2,)))
    return [token async for batch in stream for token in batch.tokens]


async def test_a_slow_version_takes_twice_as_long_for_a_token_as_the_stable_one_however_fast_its_engine_is():
    begun = time.monotonic()
    assert await answer("slow") == [500, 501, 502, 2]
    # the tokens are there at once, and a token of the stable version takes 10 ms
    assert time.monotonic() - begun >= 0.08


async def test_faults_change_tokens_and_no_lengths():
    assert await answer("language") == [7, 8, 9, 2]
    scrambled = await answer("scrambled")
    assert len(scrambled) == 4
    assert scrambled[-1] == 2
    assert set(scrambled).isdisjoint({500, 501, 502})


async def test_everything_but_its_tokens_is_that_of_the_replicas_stream():
    stream = await FaultyEngine(Pool(), "slow", lambda: 0.01).open(EngineRequest("1", [1], 4, end_ids=(2,)))
    assert (stream.version, stream.cached_tokens, stream.is_failing_over) == ("canary", 3, False)
    stream.attach(lambda batch: True)
    assert [batch.tokens async for batch in stream] == [[500], [501], [502], [2]]


async def test_a_version_of_lower_quality_misreads_its_prompts():
    pool = Pool()
    await FaultyEngine(pool, "quality", lambda: 0.01).open(EngineRequest("1", [1, 300, 301, 302, 2, 303, 999], 4))
    assert pool.seen == [1, 300, 301, 403, 2, 303, 200]
