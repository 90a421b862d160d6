"""Goodput of gateway and real Triton above their capacity.

Goals: at 2 and 10 times the capacity of two mock engines, 90 % of the best goodput remains,
answered requests meet the TTFT objective, at most two steps of prompt tokens wait inside an engine,
and a rejection takes at most 10 ms. Beside a tenant that sends ten times its share, the other
tenants' TTFT p95 grows by at most 30 %. Requests arrive at random (open loop).
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
from llmops.perf.lab.open_load import OpenLoad, is_in_time, is_rejected, words_of
from llmops.perf.load.runner import run_async
from llmops.perf.records import Record, percentile
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.replicas import Engines, engines, front, keys_of

REPLICAS, BLOCKS, SIZE, PLACES, CHUNK = 2, 2048, 16, 16, 1024
STEP, SEQUENCE, TOKEN = 0.04, 0.002, 0.0001
TTFT, TPOT = 0.5, 0.1
# Approximate number of requests per second that both engines together answer in time.
FULL = 5.0
SECONDS = 30.0
# Seconds of the runs beside a tenant that floods. These runs are longer than SECONDS, because the
# other tenants send few requests.
FLOOD_SECONDS = 60.0
# Loads, as multiples of FULL, among which the best goodput is searched.
BEST = (0.8, 1.0, 1.2)
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
        best = max(_goodput(_run(stage, words, {"": share}, SLO)[0][""]) for share in BEST)
        for times in (2, 10):
            _overloaded(stage, words, section, times, best)
        _tiers(stage, words, section)
        _flood(stage, words, section)


def _overloaded(stage: Engines, words: Sequence[int], section: Section, times: int, best: float) -> None:
    records, queue = _run(stage, words, {"": times}, SLO)
    name, found = f"{times} x", records[""]
    section.add(f"{name}: goodput relative to the optimum", 100 * _goodput(found) / best, "%", 90.0, "least")
    section.add(f"{name}: TTFT p95 of answered requests", 1000 * _late(found), "ms", 1000 * TTFT)
    section.add(f"{name}: longest prefill backlog of an engine, in steps", queue.steps, "", 2.0)
    rejected = sorted(one.e2e for one in found if is_rejected(one))
    other = [one for one in found if not one.ok and not is_rejected(one)]
    section.add(f"{name}: neither answered nor rejected", len(other), "", 0)
    if rejected:
        section.add(f"{name}: median time of a rejection", 1000 * percentile(rejected, 50), "ms", 10.0)
    for one in other[:3]:
        section.note(f"{name}: {one.error}")


def _tiers(stage: Engines, words: Sequence[int], section: Section) -> None:
    """Add to `section` the TTFT p95 of interactive requests at twice the capacity, in two tiers.

    Interactive requests are 0.6 of the capacity, and batch requests are the rest of the load.
    """
    records, _ = _run(stage, words, {"interactive": 0.6, "batch": 1.4}, {**SLO, **TIERS})
    late = _late(records["interactive"])
    section.add("2 x in two tiers: TTFT p95 of interactive requests", 1000 * late, "ms", 1000 * TTFT)


def _flood(stage: Engines, words: Sequence[int], section: Section) -> None:
    """Add to `section` the TTFT p95 of three tenants during a flood, relative to no flood.

    Each of the three tenants sends half of its share of the capacity. The fourth tenant, which
    floods, sends ten times as much as one of them.
    """
    others = {"one": 1 / 8, "two": 1 / 8, "three": 1 / 8}
    alone, _ = _run(stage, words, others, SLO, FLOOD_SECONDS)
    flooded, _ = _run(stage, words, {**others, "flood": 10 / 8}, SLO, FLOOD_SECONDS)
    before, now = (_late([one for tenant in others for one in found[tenant]]) for found in (alone, flooded))
    section.add("others' TTFT p95 during a 10 x flood, relative to alone", now / before, "", 1.3)


def _run(
    stage: Engines,
    words: Sequence[int],
    loads: Mapping[str, float],
    settings: Mapping[str, Any],
    seconds: float = SECONDS,
) -> tuple[Mapping[str, list[Record]], Queue]:
    """Return the records of each tier, and the largest queue of the engines.

    Args:
        stage: The running engines.
        words: Token ids from which prompts are made.
        settings: Settings of the gateway.
        loads: The load of each tier as a multiple of FULL. Each tier is a tenant of the same name.
            The empty name sends requests without a key.
        seconds: Time in which requests arrive.
    """

    async def send(url: str, keys: Mapping[str, str]) -> list[list[Record]]:
        sent = [
            OpenLoad(words, share * FULL, seconds, seed).send(url, keys.get(tier))
            for seed, (tier, share) in enumerate(loads.items())
        ]
        return await asyncio.gather(*sent)

    with tempfile.TemporaryDirectory() as folder:
        keys: Mapping[str, str] = {}
        if "" not in loads:
            keys = keys_of(f"sqlite:///{folder}/store.db", loads)
            settings = {**settings, "store": f"sqlite:///{folder}/store.db", "usage": {"outbox": f"{folder}/usage"}}
        with front(stage.replicas, settings) as gateway, _watched(stage) as queue:
            return dict(zip(loads, run_async(send(gateway.address, keys)), strict=True)), queue


def _goodput(records: Sequence[Record]) -> float:
    """Return the number of answers in time per second of the load."""
    return sum(is_in_time(one, TTFT, TPOT) for one in records) / SECONDS


def _late(records: Sequence[Record]) -> float:
    """Return the 95th percentile of the time to the first token, in seconds."""
    return percentile(sorted(one.ttft for one in records if one.ok and one.ttft is not None), 95)


@dataclass
class Queue:
    """The largest queue of an engine during a run.

    Attributes:
        steps: The prompt tokens still to be read, as a number of full prefill steps.
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
