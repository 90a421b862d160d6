"""Metrics of the engine, exported on Triton's metrics port.

The metrics use NVIDIA's TensorRT-LLM families with NVIDIA's label names.

Source: NVIDIA/TensorRT-LLM `triton_backend/inflight_batcher_llm/src/custom_metrics_reporter/`.
"""

from __future__ import annotations

import time

import triton_python_backend_utils as pb_utils

from .engine_runtime import EngineStats

#: The label name of each gauge family, as NVIDIA's backend names it.
FAMILIES = {
    "nv_trt_llm_request_metrics": "request_type",
    "nv_trt_llm_runtime_memory_metrics": "memory_type",
    "nv_trt_llm_kv_cache_block_metrics": "kv_cache_block_type",
    "nv_trt_llm_inflight_batcher_metrics": "inflight_batcher_specific_metric",
    "nv_trt_llm_general_metrics": "general_type",
}
#: Family that stays at 0, because no runtime runs prefill and decode on different engines.
DISAGGREGATED = ("nv_trt_llm_disaggregated_serving_metrics", "disaggregated_serving_type")
LENGTHS = {"nv_llm_input_token_len": "total_input_tokens", "nv_llm_output_token_len": "total_output_tokens"}
LENGTH_BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]


class TritonMetrics:
    """The metrics of one engine model.

    Only changed values are sent, because each `set` sends a message to Triton's process.
    """

    def __init__(self, model: str, version: str) -> None:
        self._labels = {"model": model, "version": version}
        kinds = pb_utils.MetricFamily
        # kept, because Triton drops the gauges of a family that is garbage-collected
        self._families = {label: _family(name, label, kinds.GAUGE) for name, label in FAMILIES.items()}
        self._gauges: dict[tuple[str, str], pb_utils.Metric] = {}
        self._last: dict[tuple[str, str], float] = {}
        name, label = DISAGGREGATED
        family = _family(name, label, kinds.COUNTER)
        counters = [self._metric(family, label, value) for value in ("kv_cache_transfer_ms", "request_count")]
        self._kept = [family, *counters]
        self._lengths = [self._histogram(name, value) for name, value in LENGTHS.items()]

    def report(self, stats: EngineStats) -> None:
        """Send changed gauges to Triton, and the lengths of requests that have ended."""
        values = gauge_values(stats)
        for key, value in values.items():
            if self._last.get(key) != value:
                self._gauge(*key).set(value)
        self._last.update(values)
        for lengths in stats.ended:
            for histogram, length in zip(self._lengths, lengths, strict=True):
                histogram.observe(length)

    def _gauge(self, label: str, value: str) -> pb_utils.Metric:
        gauge = self._gauges.get((label, value))
        if gauge is None:
            gauge = self._gauges[label, value] = self._metric(self._families[label], label, value)
        return gauge

    def _metric(self, family: pb_utils.MetricFamily, label: str, value: str) -> pb_utils.Metric:
        return family.Metric(labels={**self._labels, label: value})

    def _histogram(self, name: str, value: str) -> pb_utils.Metric:
        family = _family(name, "request lengths in tokens", pb_utils.MetricFamily.HISTOGRAM)
        self._kept.append(family)
        return family.Metric(labels={**self._labels, "response_metric_type": value}, buckets=LENGTH_BUCKETS)


def _family(name: str, what: str, kind: int) -> pb_utils.MetricFamily:
    return pb_utils.MetricFamily(name=name, description=f"TensorRT-LLM {what}", kind=kind)


def gauge_values(stats: EngineStats) -> dict[tuple[str, str], float]:
    """Return the value of each gauge by label name and label value.

    Gauges that the runtime does not know are left out.
    """
    groups: dict[str, dict[str, float | None]] = {
        "request_type": {
            "active": stats.active,
            "max": stats.max_requests,
            "scheduled": stats.scheduled,
            "context": stats.context,
            "waiting": stats.waiting,
        },
        "memory_type": dict(stats.memory),
        "kv_cache_block_type": _blocks(stats),
        "inflight_batcher_specific_metric": {
            "total_context_tokens": stats.context_tokens,
            "generation_requests": stats.active - stats.context,
            "micro_batch_id": 0,
            "paused_requests": stats.paused,
        },
        "general_type": {"timestamp": time.time_ns() // 1000, "iteration_counter": stats.iteration},
    }
    return {
        (label, value): number
        for label, group in groups.items()
        for value, number in group.items()
        if number is not None
    }


def _blocks(stats: EngineStats) -> dict[str, float | None]:
    """Return the block gauges, or none before the runtime has reported its blocks.

    TensorRT-LLM reports its blocks only after its first prompt.
    """
    if not stats.kv_blocks_max:
        return {}
    return {
        "max": stats.kv_blocks_max,
        "free": stats.kv_blocks_max - stats.kv_blocks_used,
        "used": stats.kv_blocks_used,
        "tokens_per": stats.tokens_per_block,
        "reused": stats.kv_blocks_reused,
        "fraction": stats.kv_blocks_used / stats.kv_blocks_max,
    }
