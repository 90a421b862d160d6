"""Statistics, sweep, comparison and the HTML page."""

import json
import re
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import InputError
from llmops.objectives import Objective
from llmops.perf.clients.event_template import EventTemplate
from llmops.perf.load.objectives import attained_shares, meets_objectives, missed_objectives, parse_objective
from llmops.perf.load.runner import LoadRun
from llmops.perf.load.sweep import SweepStep, highest_rate
from llmops.perf.records import Record, percentile
from llmops.perf.report.compare import comparison_rows
from llmops.perf.report.document import Document, read_document
from llmops.perf.report.html_page import render_page
from llmops.perf.report.summary import summarise
from tests.support.page_reader import PageReader


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200), st.sampled_from([50, 90, 95, 99]))
def test_percentiles_are_those_of_the_standard_library(values, p):
    expected = statistics.quantiles(values, n=100, method="inclusive")[p - 1]
    assert percentile(sorted(values), p) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def record(start, *times, **given):
    base = {"first": times[0], "end": times[-1], "chunks": list(times), "tokens_out": len(times)}
    return Record(start, **{**base, **given})


def test_a_summary_of_three_requests_by_hand():
    records = [
        record(0.0, 0.1, 0.2, 0.3, tokens_in=5, counted=False),
        record(0.0, 0.3, 0.5, 0.7, tokens_in=7, counted=False),
        record(0.5, 1.0, error="timeout"),
        record(0.5, 0.6, cancelled=True),
    ]
    summary = summarise(LoadRun(0.0, 1.0, records), [Objective("ttft", 0.2)])
    assert (summary.completed, summary.failed, summary.cancelled) == (2, 1, 1)
    assert (summary.ttft.p50, summary.itl.p50, summary.e2e.maximum) == pytest.approx((200, 150, 700))
    assert (summary.tpot.p50, summary.tpot.maximum) == pytest.approx((150, 200))
    assert (summary.output_tokens_per_second, summary.total_tokens_per_second) == (8, 20)
    assert (summary.goodput_share, summary.errors) == (pytest.approx(1 / 3, abs=1e-4), {"timeout": 1})


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0ms", "ttft:200", "ttft:-5ms", "latency:5s", "e2e:fast"])
def test_objectives_that_make_no_sense_are_refused(text):
    with pytest.raises(InputError, match=r"is not usable|has no colon"):
        parse_objective(text)


@given(st.floats(0.5, 200), st.floats(0.5, 50))
async def test_the_sweep_finds_the_capacity(capacity, start):
    tried = []

    async def measure(rate):
        tried.append(rate)
        return SweepStep(rate, rate <= capacity, 1.0, rate, 1.0, 1.0, 100)

    best = await highest_rate(measure, start, ceiling=1000)
    if capacity < start / 32:
        assert best is None
    else:
        assert capacity / 1.09 <= best.rate <= capacity
    assert len(tried) <= 16


def test_objectives_of_a_share_of_the_requests():
    slos = [parse_objective(text) for text in ("ttft_p50:150ms", "ttft_p95:500ms", "availability:80%", "e2e:10s")]
    records = [record(0.0, first, first + 1) for first in (0.1, 0.1, 0.2, 0.6)]
    records.append(replace(records[0], error="overloaded"))
    shares = attained_shares(records, slos)
    assert shares == {"ttft_p50:150ms": 0.5, "ttft_p95:500ms": 0.75, "availability:80%": 0.8, "e2e:10s": 0.8}
    assert missed_objectives(shares, slos, 0.99) == [
        "75.0 % of the requests met ttft_p95:500ms, which needs 95 %",
        "80.0 % of the requests met e2e:10s, and --fail-under asks for 99 %",
    ]
    # a median says nothing about a single answer
    assert meets_objectives(records[2], slos[:2])
    assert not meets_objectives(records[3], slos[:2])


def test_a_step_whose_answers_get_slower_and_slower_does_not_hold():
    growing = LoadRun(0.0, 60.0, [record(i, i + 0.1, i + 0.5 + 0.05 * i) for i in range(60)])
    steady = LoadRun(0.0, 60.0, [record(i, i + 0.1, i + 0.5) for i in range(60)])
    assert not SweepStep.of(1.0, growing, [Objective("ttft", 0.2)], 0.99).holds
    assert SweepStep.of(1.0, steady, [Objective("ttft", 0.2)], 0.99).holds


def document(*records, **options):
    run = LoadRun(0.0, max(r.end for r in records), list(records))
    given = {"url": "http://host/v1", "model": "m", "slos": [], **options}
    return Document(given, {"cpu": "x"}, summarise(run, []), records=[r.to_json(0.0) for r in records])


def many(ttft, count=400):
    return [record(i * 0.01, i * 0.01 + ttft + 0.00001 * (i % 40), i * 0.01 + ttft + 0.5) for i in range(count)]


def test_a_comparison_shows_the_ratio_of_each_figure():
    base, same, slower = (document(*many(ttft)) for ttft in (0.1, 0.1, 0.15))
    assert {row.ratio for row in comparison_rows(base, same)} == {1.0}
    row = next(row for row in comparison_rows(base, slower) if row.label == "TTFT p50, ms")
    assert row.ratio == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"x\.json is not"):
        read_document(path)


def test_the_page_is_whole_and_loads_nothing():
    steps = [SweepStep(1.0, True, 1.0, 1.0, 10.0, 20.0, 9), SweepStep(2.0, False, 0.4, 1.5, 90.0, None, 9)]
    html = render_page(replace(document(*many(0.1), model="<script>alert(1)</script>"), sweep=steps))
    assert all(address.startswith("data:") for address in PageReader(html).loads)
    assert "<script" not in html
    assert not re.search(r"url\(|@import", html)
    assert html.count("<svg") == 6


def event(text, finish=None, **more):
    return json.dumps({"id": "x", "choices": [{"delta": {"content": text}, "finish_reason": finish}], **more}).encode()


@given(st.text(min_size=1), st.text())
def test_a_token_event_is_known_by_its_shape_whatever_its_text(first, text):
    shape = EventTemplate.of(event(first))
    assert shape.fits(event(text)) == bool(text)
    assert not shape.fits(event(text, finish="stop"))
    assert not shape.fits(event(text, usage={"completion_tokens": 3}))
    assert not shape.fits(b"[DONE]")
