"""The rules as Prometheus' own tool reads them; its cases are in deploy/alerts/tests."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from llmops.build.plan.gpu_specs import GPUS
from llmops.gateway.telemetry.metric_definitions import GATEWAY_METRICS, OPTIONAL_METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "alerts"
# https://docs.nvidia.com names of `nvidia-smi -L`, which DCGM has as modelName
MODEL_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H200": "h200-sxm",
    "NVIDIA B200": "b200-sxm", "NVIDIA A100-SXM4-80GB": "a100-sxm", "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA L40S": "l40s", "NVIDIA L4": "l4",
}  # fmt: skip


def rules(file: str) -> list[dict]:
    groups = yaml.safe_load((ALERTS / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def run(promtool: list[str], *arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([*promtool, *map(str, arguments)], capture_output=True, text=True)


def test_every_case_holds(promtool):
    done = run(promtool, "test", "rules", *sorted(ALERTS.glob("tests/*.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert run(promtool, "check", "rules", *sorted(ALERTS.glob("*.yaml"))).returncode == 0


def test_every_alert_has_its_paragraph():
    runbooks = (DEPLOY / "runbooks.md").read_text()
    headings = dict(re.findall(r"^## (\w+)\n\n((?:.+\n)+)", runbooks, re.M))
    alerts = rules("alerts.yaml")
    assert sorted(headings) == sorted(rule["alert"] for rule in alerts)
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == "{{ $externalLabels.runbooks }}#" + rule["alert"].lower()
        assert len(headings[rule["alert"]].split()) > 40


def test_rules_read_only_what_there_is():
    recorded = {rule["record"] for rule in rules("recording.yaml")}
    own = {one.name for one in [*GATEWAY_METRICS, *OPTIONAL_METRICS]}
    known = recorded | own | {f"{name}_bucket" for name in own}
    used = set()
    for rule in [*rules("recording.yaml"), *rules("alerts.yaml")]:
        used |= set(re.findall(r"\b(?:llmops|llm|gpu)_\w+", re.sub(r'"[^"]*"', "", rule["expr"])))
    assert used - known == set()
    assert used & recorded


def test_the_ridge_of_each_gpu_is_the_planners():
    ridges = {
        rule["labels"]["modelName"]: float(re.fullmatch(r"vector\((.*)\)", rule["expr"])[1])
        for rule in rules("recording.yaml")
        if rule["record"] == "gpu_ridge_flops_per_byte"
    }
    assert set(MODEL_NAMES.values()) == set(GPUS)
    expected = {name: GPUS[gpu].bf16 / GPUS[gpu].bandwidth for name, gpu in MODEL_NAMES.items()}
    assert ridges == pytest.approx(expected, rel=5e-4)
