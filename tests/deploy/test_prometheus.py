"""A real Prometheus scrapes the real Triton and a gateway while faults are planted: each alert fires, each panel shows
something. `python -m llmops.perf.lab.prometheus` also mends the faults and sees the alerts go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("watched")]
DASHBOARDS = Path(__file__).parents[2] / "deploy" / "dashboards"


def silent(prometheus) -> list[tuple[str, str, str]]:
    """The queries of all dashboards that give nothing now."""
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "5s").replace("$model", ".*")
                if not prometheus.query(query):
                    found.append((path.stem, panel["title"], query))
    return found


def test_every_alert_fires_under_its_fault_and_no_panel_is_empty(promtool, engine_dir, monkeypatch):
    from llmops.perf.lab.prometheus.faults import PLANTED, SERVER_LOST, watched

    monkeypatch.chdir(Path(__file__).parents[2])
    with watched(engine_dir) as stack:
        stack.settle()
        assert stack.prometheus.firing() == set()
        stack.plant()
        assert stack.prometheus.firing() == PLANTED
        assert silent(stack.prometheus) == []
        stack.lose_triton()
        assert SERVER_LOST in stack.prometheus.firing()
