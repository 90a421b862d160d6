"""Tests of the steady state that `verify` reads from an open loop.

It consists of means, as the planner predicts them.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmops.perf.load.runner import LoadRun
from llmops.perf.records import Record
from llmops.perf.report.document import Document
from llmops.perf.report.summary import summarise
from llmops.perf.verify.findings import CheckOutcome, WrongError, unseen, works, wrong
from llmops.perf.verify.report import VerifyReport, write_textfile
from llmops.perf.verify.speed import ratios_of, steady

STREAMS, SESSIONS = 2, 4 * 2 + 20
PLAN = {"ttft": 0.5, "tpot": 0.25, "tokens_per_second": 4.0}


def document(records: list[Record]) -> Document:
    run = LoadRun(0.0, max(record.end for record in records), records)
    return Document({}, {}, summarise(run, []), records=[record.to_json(0.0) for record in records])


def answer(start: float, ttft: float, tpot: float, tokens: int = 5) -> Record:
    first = start + ttft
    chunks = [first + at * tpot for at in range(tokens)]
    return Record(start, first, chunks[-1], chunks, tokens_out=tokens, counted=False, requested=tokens)


def test_the_filling_and_the_emptying_batch_do_not_count() -> None:
    """One session a second; those at both ends are a hundred times as fast."""
    edge = {0, 1, SESSIONS - 2, SESSIONS - 1}
    records = [answer(at, *((0.005, 0.0025) if at in edge else (0.5, 0.25))) for at in range(SESSIONS)]
    # two long waits among 24: the median would not show them
    for at in (5, 15):
        records[at] = answer(at, 2.9, 0.25)
    found = steady(document(records), STREAMS)
    assert (found.requests, found.ttft) == (SESSIONS - 2 * STREAMS, pytest.approx((22 * 0.5 + 2 * 2.9) / 24))
    assert found.tpot == pytest.approx(0.25)


def test_an_engine_that_keeps_up_with_what_arrives() -> None:
    """Fewer came than planned: that is not the engine's fault."""
    records = [answer(2.0 * at, 0.5, 0.25) for at in range(SESSIONS)]
    assert ratios_of(steady(document(records), STREAMS), PLAN)["tokens/s"] == pytest.approx(1.0, abs=0.01)


def test_an_engine_that_does_not() -> None:
    """It answers one session in two seconds, one a second comes."""
    records = [answer(at, 0.5 + at, 0.25) for at in range(SESSIONS)]
    ratio = ratios_of(steady(document(records), STREAMS), PLAN)["tokens/s"]
    assert ratio == pytest.approx(0.5, abs=0.06)


def test_requests_that_fail() -> None:
    records = [answer(at, 0.5, 0.25) for at in range(SESSIONS)]
    records[7] = replace(records[7], error="grpc_unavailable")
    with pytest.raises(WrongError, match="1 of 28 requests failed under load: grpc_unavailable"):
        steady(document(records), STREAMS)


# -- Tests of the metrics that an evaluation leaves for Prometheus


def report(model: str, *findings) -> VerifyReport:
    results = [CheckOutcome("answers", f"check {at}", finding) for at, finding in enumerate(findings)]
    return VerifyReport(model, "host:8001", "tensorrt", "", True, results)


def values(path: Path) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, sample.labels["model"], sample.labels["eval"]): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_a_model_that_got_worse_is_told_as_one_that_did_not(tmp_path):
    bad = wrong("81 % of the tokens are the source's", agreement=0.81, agreement_when_built=0.97)
    path = write_textfile(report("llama", works("tokenizer"), bad), tmp_path)
    assert path == tmp_path / "llmops_eval_llama.prom"
    assert values(path) == {("llm_eval_score", "llama", "greedy"): 0.81, ("llm_eval_baseline", "llama", "greedy"): 0.97}
    # each model has a file of its own, whatever it is called
    other = write_textfile(report("org/llama", works("", agreement=1.0, agreement_when_built=1.0)), tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["llmops_eval_llama.prom", "llmops_eval_org%2Fllama.prom"]
    assert values(other)["llm_eval_score", "org/llama", "greedy"] == 1.0


def test_what_was_not_measured_leaves_what_there_was(tmp_path):
    write_textfile(report("llama", works("", agreement=0.9, agreement_when_built=1.0)), tmp_path)
    assert write_textfile(report("llama", unseen("no answers of the source"), wrong("it ended")), tmp_path) is None
    assert values(tmp_path / "llmops_eval_llama.prom")["llm_eval_score", "llama", "greedy"] == 0.9
