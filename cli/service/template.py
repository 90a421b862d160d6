"""The text of a new llmops.yaml, with the planner's results as comments."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from llmops.untrusted_text import escape_unsafe
from llmops.yaml_files import is_plain

if TYPE_CHECKING:
    from llmops.build.plan.search.layout_search import PlanResult

SCHEMA = "llmops.schema.json"
_TEMPLATE = """\
# yaml-language-server: $schema=./{{ schema }}
# The models to build and serve, on this machine and elsewhere (docs/operate.md). What reads this
# file:
#   llmops plan|build|repo|up|verify|bench -f FILE [--profile NAME]     llmops diff -f FILE
models:
  {{ name }}:
    checkpoint: {{ checkpoint }}
{% for reason in reasons %}    # {{ reason }}
{% endfor %}{% for key, value in sections %}    {{ key }}: {{ value }}
{% endfor %}
gateway:                   # settings of the gateway (docs/gateway.md)
  workers: 1               # gateway processes, at most one per CPU core
  # host: 0.0.0.0          # listen for other machines too; they need keys then (docs/accounts.md)
{% if planned %}
profiles:
  # the same service on this machine with the bundled model; choose it with --profile laptop
  laptop:
    models:
      {{ name }}:
        checkpoint: smollm2
        build: {target: openvino, quant: int8}
        slo: {ttft_p95: 5s, tpot_p95: 500ms}
        replicas: 1
{% endif %}"""


def default_model_name(checkpoint: str) -> str:
    """Return the default served name of a model: the last part of its source, as Triton allows it."""
    last = Path(checkpoint.rstrip("/")).name.removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:63] or "model"


def cpu_template(checkpoint: str, name: str) -> str:
    """Return the text of an llmops.yaml for the CPU of this machine."""
    return _render(checkpoint, name, {"build": {"target": "openvino", "quant": "int8"}})


def gpu_template(checkpoint: str, name: str, plan: PlanResult) -> str:
    """Return the text of an llmops.yaml for a planned deployment on GPUs."""
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
    slo = {target: _duration(limit) for target, limit in load.targets.items()}
    reasons = [
        f"planned: {best.replicas} x {best.name} on {best.gpus} x {best.gpu.name}, ${best.cost.hourly:,.2f} an hour",
        f"time to first token {best.point.ttft_p95 * 1e3:.0f} ms, per token {best.point.tpot_p95 * 1e3:.1f} ms "
        "(95th percentiles)",
        f"up to {best.capacity:.1f} requests/s within the objectives; `llmops plan -f` shows the others",
    ]
    sections = {
        "build": build,
        "traffic": traffic,
        "slo": slo if any(slo.values()) else None,
        "replicas": best.replicas,
    }
    return _render(checkpoint, name, sections, reasons)


def _render(checkpoint: str, name: str, sections: dict[str, Any], reasons: Sequence[str] | None = None) -> str:
    from jinja2 import Environment

    environment = Environment(trim_blocks=False, keep_trailing_newline=True)
    return environment.from_string(_TEMPLATE).render(
        schema=SCHEMA,
        name=_scalar(name),
        checkpoint=_scalar(checkpoint),
        reasons=reasons or (),
        planned=reasons is not None,
        sections=[
            (key, _flow(value) if isinstance(value, dict) else _scalar(value))
            for key, value in sections.items()
            if value is not None
        ],
    )


def _flow(values: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {_scalar(value)}" for key, value in values.items() if value is not None) + "}"


def _scalar(value: Any) -> str:
    """Return a value as YAML that is also valid inside a mapping on one line.

    Characters that an editor obeys or does not show are escaped.
    """
    text = f"{value:g}" if isinstance(value, float) else str(value)
    plain = re.fullmatch(r"[A-Za-z0-9./][\w./-]*", text, re.ASCII) and (is_plain(text) or not isinstance(value, str))
    quoted: str = yaml.safe_dump(text, default_style='"', width=sys.maxsize, allow_unicode=True)
    return text if plain else escape_unsafe(quoted.rstrip("\n"), most=sys.maxsize)


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:g}ms"
