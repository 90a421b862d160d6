"""The text of a new llmops.yaml, with the planner's results as comments."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from llmops.build.plan.search.layout_search import PlanResult

SCHEMA = "llmops.schema.json"
HEAD = f"""\
# yaml-language-server: $schema=./{SCHEMA}
# The models to build and serve, on this machine and elsewhere (docs/operate.md). What reads this file:
#   llmops plan|build|repo|up|verify|bench -f FILE [--profile NAME]     llmops diff -f FILE
"""
GATEWAY = """
gateway:                   # settings of the gateway (docs/gateway.md)
  workers: 1               # gateway processes, at most one per CPU core
  # host: 0.0.0.0          # listen for other machines too; they need keys then (docs/accounts.md)
"""
LAPTOP = """
profiles:
  laptop:                  # the same service on this machine with the bundled model; choose it with --profile laptop
    models:
      %s:
        checkpoint: smollm2
        build: {target: openvino, quant: int8}
        slo: {ttft_p95: 5s, tpot_p95: 500ms}
        replicas: 1
"""


def default_model_name(checkpoint: str) -> str:
    """Return the default served name of a model: the last part of its source, as Triton allows it."""
    last = Path(checkpoint.rstrip("/")).name.removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:63] or "model"


def cpu_template(checkpoint: str, name: str) -> str:
    """Return a service for the machine at hand."""
    model = [
        f"  {_scalar(name)}:",
        f"    checkpoint: {_scalar(checkpoint)}",
        "    build: {target: openvino, quant: int8}",
    ]
    return HEAD + "models:\n" + "\n".join(model) + "\n" + GATEWAY


def gpu_template(checkpoint: str, name: str, plan: PlanResult) -> str:
    """Return a service as it was planned."""
    from llmops.build.plan.search.plan_summary import build_plan

    chosen, request = build_plan(plan), plan.request
    best, load = plan.best, request.workload
    build = {
        "target": chosen.target,
        "quant": chosen.quantisation,
        "kv_cache": chosen.kv_cache_dtype if chosen.kv_cache_dtype != "bf16" else None,
        "gpu": chosen.gpu,
        "tp": chosen.tp_size,
        "pp": chosen.pp_size if chosen.pp_size > 1 else None,
        "ep": chosen.ep_size if chosen.ep_size > 1 else None,
        "max_batch_size": chosen.max_batch_size,
        "max_seq_len": chosen.max_seq_len,
        "max_num_tokens": chosen.max_num_tokens,
    }
    traffic = {"qps": load.qps, "isl": load.isl, "osl": load.osl, "prefix_hit": load.prefix_hit or None}
    slo = {"ttft_p95": _duration(load.ttft_p95), "tpot_p95": _duration(load.tpot_p95)}
    reasons = [
        f"planned: {best.replicas} x {best.name} on {best.gpus} x {best.gpu.name}, ${best.cost.hourly:,.2f} an hour",
        f"time to first token {best.point.ttft_p95 * 1e3:.0f} ms, per token {best.point.tpot_p95 * 1e3:.1f} ms "
        "(95th percentiles)",
        f"up to {best.capacity:.1f} requests/s within the objectives; `llmops plan -f` shows the others",
    ]
    lines = [
        "models:",
        f"  {_scalar(name)}:",
        f"    checkpoint: {_scalar(checkpoint)}",
        *(f"    # {reason}" for reason in reasons),
        f"    build: {_flow(build)}",
        f"    traffic: {_flow(traffic)}",
        *([f"    slo: {_flow(slo)}"] if any(slo.values()) else []),
        f"    replicas: {best.replicas}",
    ]
    return HEAD + "\n".join(lines) + "\n" + GATEWAY + LAPTOP % _scalar(name)


def _flow(values: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {_scalar(value)}" for key, value in values.items() if value is not None) + "}"


def _scalar(value: Any) -> str:
    """Return a value as YAML, also valid inside a mapping on one line."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    plain = re.fullmatch(r"[A-Za-z0-9./][\w./-]*", text, re.ASCII) and yaml.safe_load(text) == value
    quoted: str = yaml.safe_dump(text, default_style='"', width=sys.maxsize, allow_unicode=True)
    return text if plain else quoted.rstrip("\n")


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:g}ms"
