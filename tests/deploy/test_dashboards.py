"""Dashboards as they are shipped; test_prometheus.py shows that a real Prometheus answers each of their queries."""

import importlib
from pathlib import Path

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "dashboards"


def test_what_is_shipped_is_what_is_made():
    module = importlib.import_module("deploy.dashboards.make")
    shipped = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    assert shipped == {f"{one.name}.json": module.text(one) for one in module.DASHBOARDS}
