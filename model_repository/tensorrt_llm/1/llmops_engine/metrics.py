"""NVIDIA's TensorRT-LLM metric families on Triton's own metrics port, with NVIDIA's label names."""

from __future__ import annotations

import time
from typing import Any

import triton_python_backend_utils as pb_utils

from .runtime import EngineStats

FAMILIES = {
    "nv_trt_llm_request_metrics": ("request_type", "active max scheduled context waiting"),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "max free used tokens_per fraction"),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
    "nv_trt_llm_general_metrics": ("general_type", "timestamp iteration_counter"),
}


class Metrics:
    """Gauges of one engine model. Only what changed is sent: each `set` is a message between processes."""

    def __init__(self, model: str, version: str) -> None:
        self._families = []  # a family that is collected takes its gauges along
        self._gauges: dict[tuple[str, str], Any] = {}
        self._last: dict[tuple[str, str], float] = {}
        for name, (label, values) in FAMILIES.items():
            family = pb_utils.MetricFamily(
                name=name, description=f"TensorRT-LLM {label}", kind=pb_utils.MetricFamily.GAUGE
            )
            self._families.append(family)
            for value in values.split():
                labels = {"model": model, "version": version, label: value}
                self._gauges[label, value] = family.Metric(labels=labels)

    def report(self, stats: EngineStats) -> None:
        values = gauge_values(stats)
        for key, value in values.items():
            if self._last.get(key) != value:
                self._gauges[key].set(value)
        self._last = values


def gauge_values(stats: EngineStats) -> dict[tuple[str, str], float]:
    """(label name, label value) -> value, for every gauge of FAMILIES."""
    groups: dict[str, dict[str, float]] = {
        "request_type": {
            "active": stats.active,
            "max": stats.max_requests,
            "scheduled": stats.scheduled,
            "context": stats.context,
            "waiting": stats.waiting,
        },
        "kv_cache_block_type": {
            "max": stats.kv_blocks_max,
            "free": stats.kv_blocks_max - stats.kv_blocks_used,
            "used": stats.kv_blocks_used,
            "tokens_per": stats.tokens_per_block,
            "fraction": stats.kv_blocks_used / stats.kv_blocks_max,
        },
        "inflight_batcher_specific_metric": {
            "total_context_tokens": stats.context_tokens,
            "generation_requests": stats.active - stats.context,
            "micro_batch_id": 0,
            "paused_requests": 0,
        },
        "general_type": {"timestamp": time.time_ns() // 1000, "iteration_counter": stats.iteration},
    }
    return {(label, value): number for label, group in groups.items() for value, number in group.items()}
