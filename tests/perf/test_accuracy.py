"""The load generator's figures against a server that knows what it did."""

from itertools import pairwise
from statistics import mean, median

import pytest

from llmops.perf.bench import bench
from llmops.perf.lab.delay_server import Delays, DelayServer
from llmops.perf.load.slo import parse_slo
from llmops.perf.options import BenchOptions
from llmops.perf.report.document import read_document
from llmops.perf.workloads.lengths import parse_lengths


def options(url, **given):
    base = {"model": None, "via": "chat", "input": parse_lengths("16"), "output": parse_lengths("20"), "requests": 24}
    return BenchOptions(url=url, **{**base, **given})


def gaps(times):
    return [b - a for a, b in pairwise(times)]


async def measure(delays, **given):
    async with DelayServer(delays) as server:
        return await bench(options(server.url, **given)), server


async def test_figures_are_within_two_percent_of_what_the_server_did():
    # the warm-up opens the connections: what that takes is the client's, and the server does not see it
    document, server = await measure(Delays(ttft=0.5, itl=0.05), concurrency=8, warmup=8)
    summary, served = document.summary, server.served[8:]
    assert summary.ttft.p50 == pytest.approx(1000 * median(s.sent[0] - s.read for s in served), rel=0.02)
    assert summary.itl.p50 == pytest.approx(1000 * median(g for s in served for g in gaps(s.sent)), rel=0.02)
    assert summary.tpot.p50 == pytest.approx(1000 * median(mean(gaps(s.sent)) for s in served), rel=0.02)
    assert summary.e2e.p50 == pytest.approx(1000 * median(s.sent[-1] - s.read for s in served), rel=0.02)
    seconds = max(s.sent[-1] for s in served) - min(s.read for s in served)
    assert summary.output_tokens_per_second == pytest.approx(24 * 20 / seconds, rel=0.02)


async def test_every_token_is_stamped_when_the_server_sent_it():
    document, server = await measure(Delays(ttft=0.05, itl=0.02), concurrency=1, requests=5, warmup=0)
    for record, served in zip(document.records, server.served, strict=True):
        late = [abs(a - b) for a, b in zip(gaps(served.sent), gaps(record["chunks"]), strict=True)]
        assert median(late) < 0.02 * 0.02


async def test_open_loop_keeps_its_rate_while_the_server_is_slow():
    document, server = await measure(Delays(ttft=0.5, itl=0.01), rate=20, arrival="constant", requests=20, warmup=0)
    reads = [served.read for served in server.served]
    assert reads[-1] - reads[0] == pytest.approx(19 / 20, rel=0.05)
    assert document.summary.completed == 20


async def test_waiting_for_a_place_counts_as_latency():
    document, _ = await measure(
        Delays(ttft=0.1, itl=0), rate=1000, arrival="constant", requests=4, max_concurrency=1, warmup=0
    )
    ttfts = [record["first"] - record["start"] for record in document.records]
    assert ttfts == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)


async def test_usage_is_believed_and_chunks_are_labelled():
    counted, _ = await measure(Delays(ttft=0, itl=0, usage=False), concurrency=2)
    told, _ = await measure(Delays(ttft=0, itl=0), concurrency=2)
    assert (counted.summary.tokens_source, told.summary.tokens_source) == ("chunks", "usage")
    assert counted.summary.tokens_out == told.summary.tokens_out == 24 * 20


async def test_errors_are_told_apart():
    document, _ = await measure(Delays(ttft=0, itl=0, fail_every=4, drop_every=3), concurrency=1, warmup=0)
    assert document.summary.errors == {"http_503 overloaded": 6, "disconnected": 6}
    assert document.summary.completed == 12


async def test_a_cancelled_request_leaves_and_is_counted_apart():
    document, server = await measure(Delays(ttft=0.01, itl=0.02), concurrency=4, cancel_share=1.0, warmup=0)
    assert document.summary.cancelled == 24
    assert document.summary.completed == document.summary.failed == 0
    assert document.summary.tokens_out < 24 * 20
    # what the server still wrote before it noticed is a token or two per request
    assert sum(len(served.sent) for served in server.served) <= document.summary.tokens_out + 3 * 24


async def test_goodput_counts_requests_that_hold_every_objective():
    slos = [parse_slo("ttft:1000"), parse_slo("e2e:50")]
    document, _ = await measure(Delays(ttft=0.1, itl=0), concurrency=4, slos=slos)
    assert document.summary.goodput_share == 0
    document, _ = await measure(Delays(ttft=0.1, itl=0), concurrency=4, slos=slos[:1])
    assert document.summary.goodput_share == 1


async def test_a_report_survives_the_file(tmp_path):
    document, _ = await measure(Delays(ttft=0, itl=0.001), concurrency=4, slos=[parse_slo("ttft:500")])
    document.write(tmp_path / "run.json")
    assert read_document(tmp_path / "run.json").to_json() == document.to_json()
