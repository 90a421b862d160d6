"""A real Prometheus scrapes the real Triton and a gateway: each panel of the dashboards shows something.

That each alert fires under its fault and goes when it is mended is for `python -m llmops.perf.lab.prometheus` to show:
how soon depends on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from llmops.errors import ServerError

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("watched")]
DASHBOARDS = Path(__file__).parents[2] / "deploy" / "dashboards"


def queries() -> set[str]:
    """Those of all panels, for all models."""
    panels = [panel for path in sorted(DASHBOARDS.glob("*.json")) for panel in json.loads(path.read_text())["panels"]]
    found = {target["expr"] for panel in panels for target in panel.get("targets", ())}
    return {one.replace("$__rate_interval", "5s").replace("$model", ".*") for one in found}


def test_no_panel_is_empty(promtool, engine_dir, monkeypatch):
    from llmops.perf.lab.prometheus.faults import watched

    monkeypatch.chdir(Path(__file__).parents[2])
    silent = queries()
    assert len(silent) > 20
    with watched(engine_dir) as stack:
        stack.habits.leaving = True
        stack.told.values["llmops_usage_lag_seconds"] = 0.5

        def all_have_shown_something() -> bool:
            silent.difference_update([one for one in silent if stack.prometheus.query(one)])
            return not silent

        with contextlib.suppress(ServerError):
            stack.prometheus.wait(all_have_shown_something, 480, "every panel's query")
    assert silent == set()
