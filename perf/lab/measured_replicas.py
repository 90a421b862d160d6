"""Replicas that report nothing beside replicas that report each step, on the real Triton.

The step times are NVIDIA's measured tables for Llama 3.1 8B on an H100, made longer so that few
cores carry them, with noise and prompts read in chunks; one of three replicas is twice as slow. No
gateway knows any of this. Goals: at 2 and 10 times the capacity, replicas that report nothing answer
95 % as many requests in time, and find within 2 % as many tokens of prompts in their caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmops.perf.lab.figures import Section
from llmops.perf.lab.replay import ReplayResult, replay
from llmops.perf.lab.trace import Talks, TraceRequest, words_of
from tests.support.mock_engine.planned import planned, slower
from tests.support.mock_engine.replicas import engines, front
from tests.support.mock_engine.repository import NAME

REPLICAS, PLACES, CHUNK, BLOCKS = 3, 16, 512, 1024
#: Times of the tables' seconds that a step takes.
FACTOR = 8.0
NOISE = 0.15
TTFT, TPOT = 1.0, 0.15
#: Requests per second that the three replicas answer in time, about.
FULL = 5.0
SECONDS = 30.0
SEEDS = (0, 1)
SETTINGS: dict[str, Any] = {"slo": {"ttft_p95": f"{1000 * TTFT:g}ms", "tpot_p95": f"{1000 * TPOT:g}ms"}}


def measure(engine: Path) -> Section:
    text = (
        f"{REPLICAS} mock engines of {PLACES} sequences with measured step times x {FACTOR:g}, noise of "
        f"{100 * NOISE:g} % and chunks of {CHUNK} tokens, the second twice as slow; {len(SEEDS)} runs of {SECONDS:g} s "
        "at each load, once with step messages and once without."
    )
    section = Section("Replicas that report nothing", text)
    with section:
        words = words_of(engine)
        reported, measured = (_runs(engine, words, transports) for transports in (None, ["request"]))
        for times in (2, 10):
            told, learnt = reported[times], measured[times]
            section.add(f"{times} x: answers in time with step messages", _in_time(told), "")
            section.add(f"{times} x: answers in time without", _in_time(learnt), "")
            section.add(f"{times} x: without, relative", 100 * _in_time(learnt) / _in_time(told), "%", 95.0, "least")
            section.add(f"{times} x: prefix hits with step messages", 100 * _hits(told), "%")
            section.add(
                f"{times} x: prefix hits without, relative", 100 * _hits(learnt) / _hits(told), "%", 98.0, "least"
            )
            odd = sum(one.status not in (200, 503) for run in (*told, *learnt) for one in run.requests)
            section.add(f"{times} x: neither answered nor rejected", odd, "", 0)
    return section


def _runs(engine: Path, words: Sequence[int], transports: list[str] | None) -> dict[int, list[ReplayResult]]:
    """Return the runs by load. Each has engines of its own, whose caches are empty."""
    table = planned("meta-llama/Llama-3.1-8B", "h100-sxm")
    paged = replace(
        table,
        steps=slower(table.steps, FACTOR),
        blocks=BLOCKS,
        max_batch_size=PLACES,
        max_num_tokens=CHUNK,
        noise=NOISE,
    )
    found: dict[int, list[ReplayResult]] = {}
    for times in (2, 10):
        for seed in SEEDS:
            with engines(engine, paged, REPLICAS, transports=transports, slow={f"{NAME}-1": 2.0}) as stage:
                port = urlsplit(stage.server.metrics).port
                with front(stage.replicas, {**SETTINGS, "metrics_port": port}) as gateway:
                    result = asyncio.run(replay(gateway.address, _load(words, times, seed)))
            found.setdefault(times, []).append(result)
    return found


def _load(words: Sequence[int], times: int, seed: int) -> list[TraceRequest]:
    rate = times * FULL
    return Talks(rate=rate, sessions=round(rate * SECONDS), turns=1, seed=seed).asked(words)


def _in_time(runs: Sequence[ReplayResult]) -> int:
    return sum(one.keeps(TTFT, TPOT) for run in runs for one in run.requests)


def _hits(runs: Sequence[ReplayResult]) -> float:
    answered = [one for run in runs for one in run.ok]
    return sum(one.cached for one in answered) / max(sum(one.prompt for one in answered), 1)
