"""A real Prometheus scrapes the real Triton and a gateway: each panel of the dashboards shows something.

That each alert fires under its fault and goes when it is mended is for `python -m tests.faults.alerts` to show:
how soon depends on how busy the machine is.
"""

import contextlib
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from llmops.errors import ServerError
from tests.support.commands import llmops

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("watched")]
DASHBOARDS = Path(__file__).parents[2] / "deploy" / "dashboards"


def queries() -> set[str]:
    """Return the queries of all panels, for all models."""
    panels = [panel for path in sorted(DASHBOARDS.glob("*.json")) for panel in json.loads(path.read_text())["panels"]]
    found = {target["expr"] for panel in panels for target in panel.get("targets", ())}
    return {one.replace("$__rate_interval", "5s").replace("$model", ".*") for one in found}


def test_no_panel_is_empty(promtool, engine_dir, monkeypatch):
    from tests.faults.alerts.stack import PLAYED, watched

    monkeypatch.chdir(Path(__file__).parents[2])
    silent = queries()
    assert len(silent) > 20
    with watched(engine_dir) as stack:
        stack.habits.leaving = True
        stack.told.update({**PLAYED, "llmops_usage_lag_seconds": 0.5})

        def all_have_shown_something() -> bool:
            silent.difference_update([one for one in silent if stack.prometheus.query(one)])
            return not silent

        with contextlib.suppress(ServerError):
            stack.prometheus.wait(all_have_shown_something, 480, "every panel's query")
        shown = top(stack)
    assert silent == set()
    (model,) = shown["models"]
    assert (model["model"], model["ready"], model["replicas"]) == ("mock", 1, 1)
    # prompts are of some hundred tokens; those whose client left first were never read
    assert model["tokens_in_per_s"] > model["requests_per_s"] > 0
    assert all(0 <= model[share] <= 1 for share in ("goodput", "prefix_hit_rate", "kv_use"))
    assert 0 < model["ttft_p50_s"] <= model["ttft_p95_s"]
    (replica,) = shown["replicas"]
    assert (replica["model"], replica["kv_use"]) == ("mock", model["kv_use"])
    (gateway,) = shown["gateways"]
    assert (gateway["problem"], gateway["requests_per_s"] > 0) == ("", True)


def top(stack) -> dict:
    """Return the output of `llmops top` for the same stack.

    It is repeated until an answer has ended between its two polls.
    """
    engine = urlsplit(stack.triton.metrics).netloc
    command = ["top", "--once", "--json", "--interval", "3s", "--url", stack.gateway.address, "--engine", engine]
    for _ in range(20):
        shown = json.loads(llmops(*command).stdout)
        (model,) = shown["models"]
        if None not in (model["goodput"], model["prefix_hit_rate"], model["ttft_p95_s"]):
            break
    return shown
