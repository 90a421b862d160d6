"""Generator of Grafana's dashboards beside this file: `python deploy/dashboards/make.py`.

Changes that are made in a browser are lost. The series are documented in docs/metrics.md, and
`tests/deploy` checks every query with a real Prometheus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Height of a panel in rows of 30 pixels. Grafana's grid has 24 columns.
HEIGHT = 8
GREEN, YELLOW, RED = "green", "yellow", "red"


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard.

    `queries` maps the legend of each line to its PromQL, and `unit` is the name of a Grafana unit.
    A value turns yellow and red above the two `limits`, or below them with `low_is_bad`. `meaning`
    is the description, `kind` Grafana's type of panel, and `width` is in columns, of which there
    are 24.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    meaning: str = ""
    limits: tuple[float, float] | None = None
    low_is_bad: bool = False
    kind: str = "timeseries"
    width: int = 8


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. `rows` are panels by heading."""

    name: str
    title: str
    rows: dict[str, list[Panel]] = field(default_factory=dict)


MODEL = '{model=~"$model"}'
ENGINE = '{model=~"($model)-tensorrt_llm"}'


def rate(metric: str, by: str, selector: str = "") -> str:
    """Return the query of a rate per second, summed by a label."""
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def engine(family: str, label: str, values: str) -> str:
    """Return the query of the gauges in NVIDIA's `family` whose `label` matches the regex `values`."""
    return f'nv_trt_llm_{family}{{{label}=~"{values}", model=~"($model)-tensorrt_llm"}}'


OVERVIEW = Dashboard(
    "overview",
    "llmops: overview",
    {
        "Is it good?": [
            Panel(
                "Goodput",
                {"{{model}}": f"llm_goodput_ratio{MODEL}"},
                "percentunit",
                "Complete answers within their objectives, without those whose client left in time. "
                "A ratio below 85 % for 5 minutes pages the operator on call.",
                (0.95, 0.85),
                low_is_bad=True,
            ),
            Panel(
                "Time to first token, p95",
                {"{{model}}": 'llm_ttft_seconds{quantile="0.95", model=~"$model"}'},
                "s",
                "A value above 1 s for 5 minutes pages the operator on call.",
                (0.5, 1.0),
            ),
            Panel(
                "Time per token, p95",
                {"{{model}}": 'llm_tpot_ms{quantile="0.95", model=~"$model"}'},
                "ms",
                "Mean time per token of an answer, without its first token.",
                (50.0, 100.0),
            ),
        ],
        "Are the objectives met?": [
            Panel(
                "Burn rate of the error budgets, 1 h",
                {"{{model}} {{tier}} {{objective}}": 'llm_slo_burn_rate{window="1h", model=~"$model"}'},
                meaning="1 uses up the budget exactly in the objective's period. Above 14.4, or above 6 over "
                "six hours, the operator on call is paged.",
                limits=(6.0, 14.4),
            ),
            Panel(
                "Requests that met each objective, 1 h",
                {
                    "{{model}} {{tier}} {{objective}}": '1 - llm_slo_burn_rate{window="1h", model=~"$model"} '
                    "* ignoring (window) (1 - max by (model, tier, objective) (llmops_slo_target_ratio))"
                },
                "percentunit",
            ),
            Panel(
                "Degraded mode",
                {"{{model}}": f"max by (model) (llmops_degraded_level{MODEL})"},
                meaning="1: shorter answers, 2: the small model, 3: shorter prompts of lower tiers, 4: no lower tiers.",
                limits=(1.0, 3.0),
            ),
        ],
        "Why not?": [
            Panel(
                "Answers by outcome",
                {"{{outcome}}": rate("llmops_answers_total", "outcome", MODEL)},
                "reqps",
                "late: the first token missed its objective; slow: the later tokens missed theirs; "
                "shed: the queue was full; failed: the engine or the gateway failed; "
                "aborted: the client left before an objective was missed.",
            ),
            Panel(
                "Waiting for their first token",
                {"{{model}} {{priority}}": f"sum by (model, priority) (llm_queue_depth{MODEL})"},
                meaning="Waiting requests by the tier of the caller.",
            ),
            Panel(
                "Clients that leave",
                {"of all requests": "llm_request_abort_rate"},
                "percentunit",
                limits=(0.05, 0.1),
            ),
        ],
        "How much?": [
            Panel(
                "Tokens per second",
                {
                    "{{model}} generated": rate("llmops_completion_tokens_total", "model", MODEL),
                    "{{model}} read": rate("llmops_prompt_tokens_total", "model", MODEL),
                },
            ),
            Panel("Answers in progress", {"{{model}}": f"sum by (model) (llmops_active_streams{MODEL})"}),
            Panel(
                "Alerts",
                {"{{alertname}}": 'sum by (alertname) (ALERTS{alertname=~"Llm.*|Gpu.*"})'},
                meaning="Pending and firing alerts. The runbooks are in deploy/runbooks.md.",
            ),
        ],
    },
)

ENGINES = Dashboard(
    "engines",
    "llmops: engines",
    {
        "Batch size and KV cache": [
            Panel(
                "Batch",
                {"{{node}} {{model}}": f"gpu_batch_size{ENGINE}"},
                meaning="Sequences in a step. A GPU is used well with 32 to 128; with fewer, the GPU "
                "idles; with more, each token is slow.",
                width=12,
            ),
            Panel(
                "KV cache in use",
                {"{{node}} {{model}}": f"gpu_kv_cache_utilization{ENGINE}"},
                "percentunit",
                "Above 90 %, preemption is near. A value above 95 % for 2 minutes pages the operator on call.",
                (0.9, 0.95),
                width=12,
            ),
        ],
        "Cache": [
            Panel(
                "Prompt tokens from the prefix cache",
                {"{{model}}": f"llm_prefix_cache_hit_rate{MODEL}"},
                "percentunit",
                "Below 40 %, prompts have few common prefixes, "
                "or requests with a common prefix reach different replicas.",
                (0.4, 0.3),
                low_is_bad=True,
            ),
            Panel(
                "Preemptions per second",
                {"{{model}}": f"llm_preemption_rate{MODEL}"},
                meaning="Sequences that lost their KV-cache blocks and are computed again.",
            ),
            Panel(
                "Blocks",
                {
                    "{{model}} {{kv_cache_block_type}}": "sum by (model, kv_cache_block_type) "
                    f"({engine('kv_cache_block_metrics', 'kv_cache_block_type', 'used|free')})"
                },
            ),
        ],
        "Work": [
            Panel(
                "Sequences",
                {
                    "{{model}} {{request_type}}": "sum by (model, request_type) "
                    f"({engine('request_metrics', 'request_type', 'active|waiting|context')})"
                },
                meaning="context: sequences in prefill.",
            ),
            Panel(
                "Steps per second",
                {
                    "{{model}}": "sum by (model) (rate("
                    f"{engine('general_metrics', 'general_type', 'iteration_counter')}[$__rate_interval]))"
                },
            ),
            Panel(
                "Memory bandwidth",
                {"{{node}} {{source}}": "max by (node, source) (gpu_hbm_bandwidth_utilization)"},
                "percentunit",
                "Share of the GPUs' peak, measured by DCGM or computed by the planner's model of a step "
                "(`llmops plan --rules`). Above 80 %, decoding cannot become much faster.",
                (0.8, 0.9),
            ),
        ],
        "How well?": [
            Panel(
                "Arithmetic intensity",
                {"{{node}} {{source}}": "max by (node, source) (gpu_arithmetic_intensity)"},
                meaning="FLOPs per byte of memory traffic. "
                "Below the GPU's ridge point (295 for an H100), memory is the limit.",
                width=12,
            ),
            Panel(
                "Tokens of a step",
                {"{{node}} {{model}}": f"llmops_step_tokens{ENGINE}"},
                meaning="Tokens of running sequences and of prompts in prefill.",
                width=12,
            ),
        ],
    },
)

TENANTS = Dashboard(
    "tenants",
    "llmops: tenants and money",
    {
        "Money": [
            Panel(
                "This month",
                {"spent": "sum(max by (tenant) (llmops_spent_dollars))"},
                "currencyUSD",
                "Amount in the ledger since the 1st of the month (UTC).",
                kind="stat",
            ),
            Panel(
                "By tenant, this month",
                {"{{tenant}}": "max by (tenant) (llmops_spent_dollars)"},
                "currencyUSD",
                "The 20 tenants that spend most, and all others together. `llmops usage` shows users and keys.",
            ),
            Panel(
                "In an hour",
                {"{{tenant}}": "max by (tenant) (increase(llmops_spent_dollars[1h]))"},
                "currencyUSD",
            ),
        ],
        "Where it goes": [
            Panel(
                "By model, this month",
                {"{{model}}": "max by (model) (llmops_model_spent_dollars)"},
                "currencyUSD",
            ),
            Panel(
                "Budgets",
                {"{{tenant}}": "max by (tenant) (llmops_budget_used_ratio)"},
                "percentunit",
                "Share of the budget used in the current period. At 100 %, requests are rejected with 429.",
                (0.8, 1.0),
            ),
            Panel(
                "Usage that is not in the ledger",
                {"age of the oldest": "max(llmops_usage_lag_seconds)"},
                "s",
                "An age above 5 minutes opens a P3 alert: no usage is lost, but budgets count it late.",
                (60.0, 300.0),
            ),
        ],
        "Who is refused": [
            Panel(
                "Refused",
                {"{{status}}": rate("llmops_requests_total", "status", '{status=~"4..|503"}') + " or vector(0)"},
                "reqps",
                "401, 403: keys; 429: limits and budgets; 503: no capacity. "
                "`llmops audit` shows the keys; no series does.",
            ),
            Panel(
                "Requests by route",
                {"{{route}}": rate("llmops_requests_total", "route")},
                "reqps",
            ),
            Panel(
                "Connections closed",
                {"{{reason}}": rate("llmops_refused_connections_total", "reason") + " or vector(0)"},
                "reqps",
                "Connections that exceeded a limit of the gateway, by reason.",
            ),
        ],
        "What they use": [
            Panel(
                "Waiting, by tier",
                {"{{priority}}": f"sum by (priority) (llm_queue_depth{MODEL})"},
            ),
            Panel(
                "Tokens, this month",
                {"{{tenant}} {{kind}}": "max by (tenant, kind) (llmops_spent_tokens)"},
                meaning="cached: prompt tokens from the prefix cache, which have a lower price.",
            ),
        ],
    },
)

READY = 'max by (model) (llmops_replicas{state="ready", model=~"$model"})'

FLEET = Dashboard(
    "fleet",
    "llmops: fleet",
    {
        "Replicas": [
            Panel(
                "By state",
                {"{{model}} {{state}}": 'max by (model, state) (llmops_replicas{model=~"$model"}) > 0'},
                meaning="Number of replicas by state, as the gateways see the states. `llmops top` shows each replica.",
            ),
            Panel(
                "Failovers",
                {"{{reason}}": rate("llmops_failovers_total", "reason") + " or vector(0)"},
                "reqps",
                "lost, failed: a replica broke; drain: a roll-out; preempted: the KV cache of a replica was full.",
            ),
            Panel(
                "Servers that gateways reach",
                {"{{server}}": "sum by (server) (llmops_server_reachable)"},
                meaning="Gateway workers that reach each server. 0 for 30 s means that a node failed.",
            ),
        ],
        "Source of the state": [
            Panel(
                "Reported or measured",
                {"{{replica}} {{source}}": 'max by (model, replica, source) (llmops_replica_info{model=~"$model"})'},
                meaning="NVIDIA's C++ backend reports no state, so gateways measure it.",
            ),
        ],
        "Is it enough?": [
            Panel(
                "Waiting for each ready replica",
                {"{{model}}": f"sum by (model) (llm_queue_depth{MODEL}) / ({READY} > 0)"},
                meaning="The metric by which autoscaling adds replicas.",
            ),
            Panel(
                "KV cache, fullest and mean",
                {
                    "{{model}} fullest": f"max by (model) (gpu_kv_cache_utilization{ENGINE})",
                    "{{model}} mean": f"avg by (model) (gpu_kv_cache_utilization{ENGINE})",
                },
                "percentunit",
                "A large difference means that requests with a common prefix are on few replicas.",
                (0.9, 0.95),
            ),
            Panel(
                "Batch, largest and smallest",
                {
                    "{{model}} largest": f"max by (model) (gpu_batch_size{ENGINE})",
                    "{{model}} smallest": f"min by (model) (gpu_batch_size{ENGINE})",
                },
            ),
        ],
        "Gateways' own time": [
            Panel(
                "Until the answer begins, without the engine",
                {
                    "{{instance}} p95": "histogram_quantile(0.95, sum by (instance, le) "
                    "(rate(llmops_overhead_seconds_bucket[$__rate_interval])))"
                },
                "s",
            ),
            Panel(
                "Where it goes",
                {
                    "{{stage}}": rate("llmops_stage_seconds_sum", "stage") + " / ignoring (stage) group_left () "
                    "sum(rate(llmops_overhead_seconds_count[$__rate_interval]))"
                },
                "s",
                "The mean per request. upstream is the time in the engine.",
            ),
            Panel(
                "Event loop blocked",
                {"{{instance}}": rate("llmops_event_loop_blocked_seconds_total", "instance")},
                "percentunit",
                "Share of the time in which the gateway's own work kept all streams waiting for over 50 ms.",
                (0.01, 0.05),
            ),
        ],
        "Gateways' resources": [
            Panel("Memory", {"{{instance}}": "sum by (instance) (process_resident_memory_bytes)"}, "bytes"),
            Panel("Streams", {"{{instance}}": "sum by (instance) (llmops_active_streams)"}),
            Panel(
                "Between two tokens, p99",
                {
                    "{{model}}": "histogram_quantile(0.99, sum by (model, le) "
                    f"(rate(llmops_inter_token_latency_seconds_bucket{MODEL}[$__rate_interval])))"
                },
                "s",
            ),
        ],
    },
)

DASHBOARDS = (OVERVIEW, ENGINES, TENANTS, FLEET)


def rendered(dashboard: Dashboard) -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in dashboard.rows.items():
        panels.append(_row(heading, len(panels) + 1, y))
        y, x = y + 1, 0
        for panel in row:
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += HEIGHT
    return {
        "uid": f"llmops-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["llmops"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "title": "llmops", "tags": ["llmops"], "asDropdown": True}],
        "templating": {"list": [_datasource(), _model()]},
        "panels": panels,
    }


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    return {"id": number, "type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for at, (legend, query) in enumerate(panel.queries.items())
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel)}
    if panel.unit == "percentunit":
        defaults["max"] = 1
    if panel.limits and panel.kind == "timeseries":
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def _thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": GREEN, "value": None}]
    if panel.limits:
        first, second = panel.limits
        steps += [{"color": YELLOW, "value": first}, {"color": RED, "value": second}]
        if panel.low_is_bad:
            steps = [
                {"color": RED, "value": None},
                {"color": YELLOW, "value": second},
                {"color": GREEN, "value": first},
            ]
    return {"mode": "absolute", "steps": steps}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _model() -> dict[str, Any]:
    query = "label_values(llmops_answers_total, model)"
    everything = {"selected": True, "text": "All", "value": "$__all"}
    return {
        "name": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "models"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": everything,
    }


def text(dashboard: Dashboard) -> str:
    return json.dumps(rendered(dashboard), indent=1) + "\n"


if __name__ == "__main__":
    for one in DASHBOARDS:
        (HERE / f"{one.name}.json").write_text(text(one))
