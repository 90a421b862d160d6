"""Tests of the gauges for each value that a runtime may not know."""

from __future__ import annotations

from llmops_engine.engine_runtime import EngineStats
from llmops_engine.metrics import gauge_values

BLOCKS = "kv_cache_block_type"


def named(stats: EngineStats, label: str) -> dict[str, float]:
    return {value: number for (name, value), number in gauge_values(stats).items() if name == label}


def test_before_the_first_prompt_nothing_is_known_of_the_cache() -> None:
    stats = EngineStats(0, 0, 0, 0, 0, 0, kv_blocks_max=0, kv_blocks_used=0, tokens_per_block=0, max_requests=8)
    assert named(stats, BLOCKS) == {}
    assert named(stats, "memory_type") == {}
    assert named(stats, "request_type")["max"] == 8


def test_what_the_runtime_knows_is_all_told() -> None:
    stats = EngineStats(
        3, 2, 1, 1, 40, 9, 100, 25, 32, 8, kv_blocks_reused=7, paused=1, memory=(("gpu", 5), ("cpu", 6), ("pinned", 0))
    )
    assert named(stats, BLOCKS) == {
        "max": 100, "free": 75, "used": 25, "tokens_per": 32, "reused": 7, "fraction": 0.25,
    }  # fmt: skip
    assert named(stats, "memory_type") == {"gpu": 5, "cpu": 6, "pinned": 0}
    assert named(stats, "inflight_batcher_specific_metric") == {
        "total_context_tokens": 40, "generation_requests": 2, "micro_batch_id": 0, "paused_requests": 1,
    }  # fmt: skip


def test_a_runtime_without_a_count_of_reused_blocks_leaves_it_out() -> None:
    assert "reused" not in named(EngineStats(0, 0, 0, 0, 0, 0, 100, 25, 32, 8), BLOCKS)
