"""The load generator's figures against a server that knows what it did."""

from itertools import pairwise
from statistics import mean, median

import pytest

from llmops.perf.bench import bench
from llmops.perf.load.objectives import parse_objective
from llmops.perf.options import BenchOptions
from llmops.perf.workloads.lengths import parse_lengths
from tests.support.delay_server import Delays, DelayServer


def options(url, **given):
    base = {"model": None, "via": "chat", "input": parse_lengths("16"), "output": parse_lengths("20"), "requests": 24}
    return BenchOptions(url=url, **{**base, **given})


def gaps(times):
    return [b - a for a, b in pairwise(times)]


async def measure(delays, **given):
    async with DelayServer(delays) as server:
        return await bench(options(server.url, **given)), server


def milliseconds(seconds):
    return pytest.approx(1000 * seconds, abs=0.01)


async def test_figures_are_those_of_the_moments_that_it_saw():
    """The figures are those of the client's clock.

    The difference to the server's clock on a quiet machine is measured by `make bench`.
    """
    document, _ = await measure(Delays(ttft=0.2, itl=0.02), concurrency=8, warmup=8)
    summary, records = document.summary, document.records
    seen = [record["chunks"] for record in records]
    starts = [record["start"] for record in records]
    assert summary.ttft.p50 == milliseconds(median(c[0] - s for c, s in zip(seen, starts, strict=True)))
    assert summary.itl.p50 == milliseconds(median(gap for chunks in seen for gap in gaps(chunks)))
    assert summary.tpot.p50 == milliseconds(median(mean(gaps(chunks)) for chunks in seen))
    assert summary.e2e.p50 == milliseconds(median(r["end"] - r["start"] for r in records))
    seconds = max(record["end"] for record in records) - min(starts)
    assert summary.output_tokens_per_second == pytest.approx(24 * 20 / seconds, rel=0.01)


async def test_every_token_is_stamped_when_it_came():
    document, server = await measure(Delays(ttft=0.05, itl=0.02), concurrency=1, requests=5, warmup=0)
    for record, served in zip(document.records, server.served, strict=True):
        stamps = [document.origin + stamp for stamp in record["chunks"]]
        assert document.origin + record["start"] < served.read
        assert all(sent < stamp for sent, stamp in zip(served.sent, stamps, strict=True))
        # a client that reads late stamps several at once; most came before the server sent the next one
        assert sum(stamp < after for stamp, after in zip(stamps, served.sent[1:], strict=False)) > 10


async def test_open_loop_does_not_wait_for_a_slow_server():
    document, server = await measure(Delays(ttft=2, itl=0.01), rate=100, arrival="constant", requests=20, warmup=0)
    due = sorted(record["start"] - record["lag"] for record in document.records)
    assert gaps(due) == pytest.approx([0.01] * 19, abs=1e-5)
    assert max(served.read for served in server.served) < min(served.sent[0] for served in server.served)
    assert document.summary.completed == 20


async def test_waiting_for_a_place_counts_as_latency():
    load = {"rate": 1000, "arrival": "constant", "requests": 4, "concurrency": 1, "warmup": 0}
    document, _ = await measure(Delays(ttft=0.1, itl=0), **load)
    due = [record["start"] - record["lag"] for record in document.records]
    assert gaps(due) == pytest.approx([0.001] * 3, abs=1e-5)
    waited = [record["first"] - record["start"] + record["lag"] for record in document.records]
    # the server took its tenth of a second for each of them, one after the other
    assert all(seconds > 0.1 * place - 0.001 * place for place, seconds in enumerate(waited, 1))


async def test_usage_is_believed_and_chunks_are_labelled():
    counted, _ = await measure(Delays(ttft=0, itl=0, usage=False), concurrency=2)
    told, _ = await measure(Delays(ttft=0, itl=0), concurrency=2)
    assert (counted.summary.tokens_source, told.summary.tokens_source) == ("chunks", "usage")
    assert counted.summary.tokens_out == told.summary.tokens_out == 24 * 20


async def test_a_cancelled_request_leaves_and_is_counted_apart():
    document, server = await measure(Delays(ttft=0.01, itl=0.02), concurrency=4, cancel_share=1.0, warmup=0)
    assert document.summary.cancelled == 24
    assert document.summary.completed == document.summary.failed == 0
    assert document.summary.tokens_out < 24 * 20
    # what the server still wrote before it noticed is a token or two per request
    assert sum(len(served.sent) for served in server.served) <= document.summary.tokens_out + 3 * 24


async def test_goodput_counts_requests_that_hold_every_objective():
    slos = [parse_objective("ttft:1000ms"), parse_objective("e2e:50ms")]
    document, _ = await measure(Delays(ttft=0.1, itl=0), concurrency=4, slos=slos)
    assert document.summary.goodput_share == 0
    document, _ = await measure(Delays(ttft=0.1, itl=0), concurrency=4, slos=slos[:1])
    assert document.summary.goodput_share == 1
