"""Tests of the metrics that an evaluation leaves for Prometheus."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from llmops.perf.verify.findings import CheckOutcome, unseen, works, wrong
from llmops.perf.verify.report import VerifyReport, write_textfile


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
