"""Dashboards as they are shipped: made from make.py, and of metrics that exist."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import yaml

from llmops.gateway.telemetry.metric_definitions import GATEWAY_METRICS, OPTIONAL_METRICS
from tests.support.dashboard_screenshots import picture

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "deploy" / "dashboards"
NVIDIA = ROOT / "model_repository" / "tensorrt_llm" / "1" / "llmops_engine" / "metrics.py"


def make():
    return importlib.import_module("deploy.dashboards.make")


def panels() -> list[tuple[str, str, str]]:
    """(dashboard, panel, query) of all that is shipped."""
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [(path.stem, panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


def known() -> set[str]:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts" / "recording.yaml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    own = {one.name for one in [*GATEWAY_METRICS, *OPTIONAL_METRICS]}
    parts = {
        f"{one.name}_{part}"
        for one in GATEWAY_METRICS
        if one.kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    nvidia = set(re.findall(r'"(nv_trt_llm_\w+)": "', NVIDIA.read_text()))
    assert len(nvidia) == 5
    return recorded | own | parts | nvidia | {"ALERTS"}


def test_what_is_shipped_is_what_is_made():
    module = make()
    shipped = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    assert shipped == {f"{one.name}.json": module.text(one) for one in module.DASHBOARDS}


def test_panels_show_metrics_that_exist():
    for panel in panels():
        used = set(re.findall(r"\b(?:(?:llmops|llm|gpu|nv|process)_\w+|ALERTS)\b", re.sub(r'"[^"]*"', "", panel[2])))
        assert used, panel
        assert used <= known(), panel


def test_prometheus_can_read_every_query(promtool, tmp_path):
    queries = [query.replace("$__rate_interval", "1m").replace("$model", ".*") for _, _, query in panels()]
    rules = [{"record": f"panel:{at}", "expr": query} for at, query in enumerate(queries)]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([*promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


def test_pictures_have_every_panel_with_what_was_answered():
    def ask(query: str) -> list[dict]:
        labels = {"model": "llama", "tenant": "a<b", "instance": "gateway-1:9000"}
        return [{"metric": labels, "values": [[100.0 + at, str(at * 1e6)] for at in range(5)]}]

    for path in DASHBOARDS.glob("*.json"):
        content = json.loads(path.read_text())
        drawn = ElementTree.fromstring(picture(content, ask, 100.0))
        texts = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
        assert {panel["title"] for panel in content["panels"]} <= set(texts)
        drawn_as_lines = [panel for panel in content["panels"] if panel["type"] == "timeseries"]
        lines = sum(len(panel["targets"]) for panel in drawn_as_lines)
        assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == lines
        assert "No data." not in texts
