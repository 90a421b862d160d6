"""Goodput on the real Triton above its capacity.

Goals: at 2 and 10 times the capacity of two mock engines, 90 % of the best goodput remains,
answered requests keep the TTFT objective, no more than two steps of prompt tokens wait inside an
engine, and rejections take at most 10 ms; beside a tenant that floods tenfold, the other tenants'
TTFT p95 grows by at most 30 %. Requests arrive at random (open loop).
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmops.perf.lab.figures import Section
from llmops.perf.lab.replay import ReplayResult, replay
from llmops.perf.lab.trace import Talks, TraceRequest, words_of
from llmops.perf.records import percentile
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.replicas import Engines, engines, front, keys_of

REPLICAS, BLOCKS, SIZE, PLACES, CHUNK = 2, 2048, 16, 16, 1024
STEP, SEQUENCE, TOKEN = 0.04, 0.002, 0.0001
TTFT, TPOT = 0.5, 0.1
# Requests per second that both engines answer in time, about.
FULL = 5.0
SECONDS = 30.0
# Seconds of the runs beside a tenant that floods: the other tenants send few requests.
FLOOD_SECONDS = 60.0
# Loads as parts of FULL among which the best goodput is sought.
BEST = (0.8, 1.0, 1.2)
ONE = Talks(rate=FULL, sessions=1, turns=1)
SLO = {"slo": {"ttft_p95": f"{1000 * TTFT:g}ms", "tpot_p95": f"{1000 * TPOT:g}ms"}}
TIERS = {"tiers": {"interactive": {"weight": 4}, "batch": {"max_wait": "5s"}}}
LOOK = 0.1
CONDITIONS = (
    f"{REPLICAS} mock engines of {PLACES} sequences on the real Triton: a step takes {1000 * STEP:g} ms, "
    f"{1000 * SEQUENCE:g} ms more per sequence and {1000 * TOKEN:g} ms per prompt token. Objectives: "
    f"{1000 * TTFT:g} ms to the first token, {1000 * TPOT:g} ms for each after it. {SECONDS:g} s of each load."
)


def measure(engine: Path, section: Section) -> None:
    paged = constant(STEP, TOKEN, BLOCKS, SEQUENCE, max_batch_size=PLACES, max_num_tokens=CHUNK)
    with engines(engine, replace(paged, tokens_per_block=SIZE), REPLICAS) as stage:
        words = words_of(engine)
        best = max(_goodput(_run(stage, _load(words, share), SLO)[0]) for share in BEST)
        for times in (2, 10):
            _overloaded(stage, words, section, times, best)
        _tiers(stage, words, section)
        _flood(stage, words, section)


def _overloaded(stage: Engines, words: Sequence[int], section: Section, times: int, best: float) -> None:
    result, queue = _run(stage, _load(words, times), SLO)
    name = f"{times} x"
    section.add(f"{name}: goodput relative to the optimum", 100 * _goodput(result) / best, "%", 90.0, "least")
    section.add(f"{name}: TTFT p95 of answered requests", 1000 * result.of(lambda one: one.ttft, 95), "ms", 1000 * TTFT)
    section.add(f"{name}: longest prefill backlog of an engine, in steps", queue.steps, "", 2.0)
    _refusals(section, name, result)


def _refusals(section: Section, name: str, result: ReplayResult) -> None:
    refused = [one for one in result.requests if one.status == 503]
    other = [one for one in result.requests if not one.ok and one.status != 503]
    section.add(f"{name}: neither answered nor rejected", len(other), "", 0)
    if refused:
        at_once = sorted(one.last - one.sent for one in refused)
        section.add(f"{name}: median time of a rejection", 1000 * percentile(at_once, 50), "ms", 10.0)
        section.add(f"{name}: rejected without Retry-After", sum(one.retry_after <= 0 for one in refused), "", 0)
    for one in other[:3]:
        section.note(f"{name}: {one.status} {one.error[:200]}")


def _tiers(stage: Engines, words: Sequence[int], section: Section) -> None:
    """Measure two tiers at twice the capacity.

    Interactive requests alone are 0.6 of the capacity; the rest is batch.
    """
    result, _ = _run(stage, _load(words, 2, (("interactive", 0.3), ("batch", 0.7))), {**SLO, **TIERS})
    interactive = ReplayResult([one for one in result.requests if one.asked.tier == "interactive"])
    late = interactive.of(lambda one: one.ttft, 95)
    section.add("2 x in two tiers: TTFT p95 of interactive requests", 1000 * late, "ms", 1000 * TTFT)


def _flood(stage: Engines, words: Sequence[int], section: Section) -> None:
    """Measure tenants beside a tenant that floods.

    Three of four tenants send half of their share, the fourth ten times as much as each of them.
    """
    others = [(tenant, 1.0) for tenant in ("one", "two", "three")]
    alone, _ = _run(stage, _load(words, 3 / 8, others, FLOOD_SECONDS), SLO)
    flooded, _ = _run(stage, _load(words, 13 / 8, [*others, ("flood", 10.0)], FLOOD_SECONDS), SLO)
    beside = ReplayResult([one for one in flooded.requests if one.asked.tier != "flood"])
    before, now = (one.of(lambda seen: seen.ttft, 95) for one in (alone, beside))
    section.add("others' TTFT p95 during a 10 x flood, relative to alone", now / before, "", 1.3)


def _load(
    words: Sequence[int],
    times: float,
    tiers: Sequence[tuple[str, float]] = (("", 1.0),),
    seconds: float = SECONDS,
) -> list[TraceRequest]:
    rate = times * FULL
    return replace(ONE, rate=rate, sessions=round(rate * seconds), tiers=tuple(tiers)).asked(words)


def _run(stage: Engines, trace: Sequence[TraceRequest], settings: Mapping[str, Any]) -> tuple[ReplayResult, Queue]:
    with tempfile.TemporaryDirectory() as folder:
        keys = None
        if named := sorted({one.tier for one in trace} - {""}):
            keys = keys_of(f"sqlite:///{folder}/store.db", named)
            settings = {**settings, "store": f"sqlite:///{folder}/store.db", "usage": {"outbox": f"{folder}/usage"}}
        with front(stage.replicas, settings) as gateway, _watched(stage) as queue:
            return asyncio.run(replay(gateway.address, trace, keys=keys)), queue


def _goodput(result: ReplayResult) -> float:
    """Return the answers in time, per second in which requests came."""
    return sum(one.keeps(TTFT, TPOT) for one in result.requests) / max(one.asked.at for one in result.requests)


@dataclass
class Queue:
    """The largest queue that an engine had during a run.

    Attributes:
        steps: Prompt tokens that are still to be read, in steps of a full batch.
    """

    steps: float = 0.0


@contextlib.contextmanager
def _watched(stage: Engines) -> Iterator[Queue]:
    queue, over = Queue(), threading.Event()
    step = STEP + PLACES * SEQUENCE

    def look() -> None:
        while not over.wait(LOOK):
            tokens = stage.most("nv_trt_llm_inflight_batcher_metrics", "total_context_tokens")
            queue.steps = max(queue.steps, tokens * TOKEN / step)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield queue
    finally:
        over.set()
        watch.join()
