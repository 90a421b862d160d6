"""Dashboards as they are shipped: made from make.py, and of metrics that exist."""

import importlib
import json
from pathlib import Path
from xml.etree import ElementTree

from tests.support.dashboard_screenshots import picture

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "deploy" / "dashboards"


def make():
    return importlib.import_module("deploy.dashboards.make")


def test_what_is_shipped_is_what_is_made():
    module = make()
    shipped = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    assert shipped == {f"{one.name}.json": module.text(one) for one in module.DASHBOARDS}


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
