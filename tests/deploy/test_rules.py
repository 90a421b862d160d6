"""The rules as Prometheus' own tool reads them; its cases are in deploy/alerts/tests."""

from __future__ import annotations

import re
import shutil
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
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-sxm",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
}


def rules(file: str) -> list[dict]:
    groups = yaml.safe_load((ALERTS / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def run(promtool: list[str], *arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([*promtool, *map(str, arguments)], capture_output=True, text=True)


def test_every_case_holds(promtool):
    done = run(promtool, "test", "rules", *sorted(ALERTS.glob("tests/*.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert run(promtool, "check", "rules", *sorted(ALERTS.glob("*.yaml"))).returncode == 0


GATEWAYS = 'up{job="llmops-gateway"}'
SERVERS = 'up{job=~".*triton.*"}'
# a threshold, a condition or a patience that is another than the one that was asked for
FAULTS = [
    ("LlmGatewaysDown", "expr", f"sum by (job, namespace) ({GATEWAYS}) == 0"),
    ("LlmGatewaysDown", "expr", f"absent({GATEWAYS})"),
    ("LlmGatewaysDown", "expr", f"{GATEWAYS} == 0"),
    ("LlmGatewaysDown", "for", "10m"),
    ("LlmEnginesDown", "expr", f"sum by (job, namespace) ({SERVERS}) == 0"),
    ("LlmEnginesDown", "expr", f"absent({SERVERS}) or sum by (job) ({SERVERS}) == 0"),
    ("LlmControlDown", "expr", 'absent(up{job="llmops-control"})'),
    ("LlmControlDown", "expr", 'sum by (job, namespace) (up{job="llmops-control"}) == 0'),
    ("LlmEveryCallerRefused", "expr", 'sum by (job) (rate(llmops_requests_total{status="401"}[5m])) > 0'),
    (
        "LlmEveryCallerRefused",
        "expr",
        'sum(rate(llmops_requests_total{status="401"}[5m])) / sum(rate(llmops_requests_total[5m])) > 0.95',
    ),
    ("LlmGoodputDrop", "expr", "llm_goodput_ratio < 0.79"),
    ("LlmGoodputDrop", "for", "1m"),
    ("LlmErrorBudgetBurn", "expr", 'llm_slo_burn_rate{window="5m"} > 14.4'),
    ("LlmErrorBudgetBurnSlow", "expr", 'llm_slo_burn_rate{window="1d"} > 10'),
    ("LlmTtftSpike", "expr", 'llm_ttft_seconds{quantile="0.95"} > 5'),
    ("LlmTtftSpike", "for", "20m"),
    ("GpuKvCacheNearOom", "expr", "gpu_kv_cache_utilization > 0.97"),
    ("GpuKvCacheNearOom", "for", "1m"),
    ("GpuNodeFailure", "for", "10s"),
    ("GpuNodeFailure", "expr", "llmops_server_reachable == 0"),
    ("LlmReplicaCrashLoop", "expr", "sum by (model) (increase(llmops_replica_restarts_total[15m])) > 2"),
    ("LlmPrefixCacheHitRateDrop", "for", "5m"),
    ("LlmPrefixCacheHitRateDrop", "expr", "llm_prefix_cache_hit_rate < 0.19"),
    ("LlmRequestAbortRateSpike", "expr", "llm_request_abort_rate > 0.21"),
    ("LlmRequestAbortRateSpike", "for", "20m"),
    ("LlmQualityRegression", "expr", "1 - llm_eval_score / llm_eval_baseline > 0.03"),
    ("LlmBillingLag", "expr", "max(llmops_usage_lag_seconds) > 200"),
    ("LlmUsageParked", "expr", "llmops_usage_dead_letters > 0"),
    ("LlmUsageParked", "expr", "delta(llmops_usage_dead_letters[1h]) > 15"),
]


@pytest.mark.parametrize(("alert", "field", "value"), FAULTS)
def test_the_cases_notice_a_wrong_rule(promtool, tmp_path, alert, field, value):
    shutil.copytree(ALERTS, tmp_path, dirs_exist_ok=True)
    content = yaml.safe_load((ALERTS / "alerts.yaml").read_text())
    for rule in content["groups"][0]["rules"]:
        if rule["alert"] == alert:
            assert rule[field] != value
            rule[field] = value
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(content))
    cases = []
    for path in sorted((tmp_path / "tests").glob("*.yaml")):
        every = yaml.safe_load(path.read_text())
        alerts = [{case["alertname"] for case in one.get("alert_rule_test", ())} for one in every["tests"]]
        named = [one for one, names in zip(every["tests"], alerts, strict=True) if alert in names]
        if named:
            path.write_text(yaml.safe_dump({**every, "tests": named}))
            cases.append(path)
    done = run(promtool, "test", "rules", *cases)
    assert done.returncode != 0
    assert alert in done.stdout + done.stderr


def test_every_alert_has_its_paragraph():
    runbooks = (DEPLOY / "runbooks.md").read_text()
    headings = dict(re.findall(r"^## (\w+)\n\n((?:.+\n)+)", runbooks, re.M))
    alerts = rules("alerts.yaml")
    assert sorted(headings) == sorted(rule["alert"] for rule in alerts)
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == "{{ $externalLabels.runbooks }}#" + rule["alert"].lower()
        assert len(headings[rule["alert"]].split()) > 40


def test_a_total_loss_wakes_somebody():
    priorities = {rule["alert"]: rule["labels"]["priority"] for rule in rules("alerts.yaml")}
    assert {priorities[one] for one in ("LlmGatewaysDown", "LlmEnginesDown", "LlmEveryCallerRefused")} == {"P1"}


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
