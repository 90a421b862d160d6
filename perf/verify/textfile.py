"""How a model answers now, and how it did when it was built: `llm_eval_score` in a file for Prometheus' node exporter.

https://github.com/prometheus/node_exporter#textfile-collector
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from llmops.gateway.telemetry.metric_definitions import EVAL_BASELINE, EVAL_SCORE, MetricDefinition
from llmops.perf.verify.report import VerifyReport

# the label `eval`: share of the source's greedy answers that the deployment gives as well
GREEDY = "greedy"


def write_textfile(report: VerifyReport, folder: Path) -> Path | None:
    """The file of this model in `folder`, whole or not at all; None where nothing was measured. Raises OSError."""
    figures = next((one.finding.figures for one in report.results if "agreement" in one.finding.figures), None)
    if figures is None:
        return None
    registry = CollectorRegistry()
    for name, figure in ((EVAL_SCORE, "agreement"), (EVAL_BASELINE, "agreement_when_built")):
        _gauge(name, registry).labels(report.model, GREEDY).set(figures[figure])
    file = folder / f"llmops_eval_{quote(report.model, safe='')}.prom"
    write_to_textfile(str(file), registry)
    return file


def _gauge(name: MetricDefinition, registry: CollectorRegistry) -> Gauge:
    return Gauge(name.name, name.meaning, name.labels, registry=registry)
