"""Render Prometheus recording rules for a planned model.

The rules compute arithmetic intensity and memory bandwidth without DCGM. The engines' own metrics
count the tokens of steps (deploy/alerts/recording.yaml has `llmops_step_tokens`,
`llmops_step_cached_tokens` and `llmops_steps_per_second`); the plan knows the work per token.
"""

from typing import Any

from llmops.build.plan.search.layout_search import PlanResult
from llmops.build.plan.speed.step_work import WorkAmount, step_work
from llmops.contract import ENGINE_SUFFIX


def render_rules(plan: PlanResult, name: str) -> dict[str, Any]:
    """Return Prometheus rules, as JSON values, for model `name` on replicas of the best layout."""
    best, request = plan.best, plan.request
    batch = round(best.best.concurrency)
    work = step_work(request.model, request.precision, request.kv, best.layout, batch)
    series = f'{{model="{name}{ENGINE_SUFFIX}"}}'
    flops, bytes_ = _expression(work.flops, series), _expression(work.bytes, series)
    bandwidth = best.layout.gpus * best.gpu.bandwidth
    recorded = {
        "gpu_arithmetic_intensity": f"({flops}) / ({bytes_})",
        "gpu_hbm_bandwidth_utilization": f"({bytes_}) * llmops_steps_per_second{series} / {bandwidth:.6g}",
    }
    group = {
        "name": f"llmops-work-{name}",
        "interval": "15s",
        "rules": [
            {"record": record, "labels": {"source": "model"}, "expr": expression}
            for record, expression in recorded.items()
        ],
    }
    return {"groups": [group]}


def _expression(amount: WorkAmount, series: str) -> str:
    return (
        f"{amount.step:.6g} + {amount.token:.6g} * llmops_step_tokens{series}"
        f" + {amount.cached:.6g} * llmops_step_cached_tokens{series}"
    )
