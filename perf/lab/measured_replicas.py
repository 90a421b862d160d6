"""Replicas that report nothing beside replicas that report each step, on the real Triton.

The step times are NVIDIA's measured tables for Llama 3.1 8B on an H100, made longer so that few
cores carry them, with noise and prompts read in chunks; one of three replicas is twice as slow. No
gateway knows any of this. Goals: at 2 and 10 times the capacity, replicas that report nothing
answer 95 % as many requests in time, and find within 2 % as many tokens of prompts in their caches.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmops.perf.lab.figures import Section
from llmops.perf.lab.replay import replay
from llmops.perf.lab.trace import Talks, TraceRequest, words_of
from tests.support.mock_engine.planned import planned, slower
from tests.support.mock_engine.replicas import engines, front
from tests.support.mock_engine.repository import NAME

REPLICAS, PLACES, CHUNK, BLOCKS = 3, 16, 512, 1024
#: Times of the tables' seconds that a step takes.
FACTOR = 32.0
NOISE = 0.15
TTFT, TPOT = 4.0, 0.6
#: Requests per second that the three replicas answer in time, about.
FULL = 2.5
SECONDS = 60.0
SEEDS = (0, 1)
SETTINGS: dict[str, Any] = {"slo": {"ttft_p95": f"{1000 * TTFT:g}ms", "tpot_p95": f"{1000 * TPOT:g}ms"}}
CONDITIONS = (
    f"{REPLICAS} mock engines of {PLACES} sequences with measured step times x {FACTOR:g}, noise of "
    f"{100 * NOISE:g} % and chunks of {CHUNK} tokens, the second twice as slow; objectives of {TTFT:g} s and "
    f"{1000 * TPOT:g} ms; {len(SEEDS)} runs of {SECONDS:g} s at each load, with step messages and without."
)


@dataclass
class RunFigures:
    """The answers in time of some runs, and the tokens of prompts, all and those found in caches."""

    in_time: int = 0
    answered: int = 0
    odd: int = 0
    prompt: int = 0
    cached: int = 0

    @property
    def hits(self) -> float:
        return self.cached / max(self.prompt, 1)


def measure(engine: Path, section: Section) -> None:
    words = words_of(engine)
    for times in (2, 10):
        told, learnt = RunFigures(), RunFigures()
        # alternating, so that what else the machine does disturbs both
        for seed in SEEDS:
            for outcome, transports in ((told, None), (learnt, ["request"])):
                _run(engine, _load(words, times, seed), transports, outcome)
        section.add(f"{times} x: without, relative", 100 * learnt.in_time / told.in_time, "%", 95.0, "least")
        section.add(f"{times} x: prefix hits without, relative", 100 * learnt.hits / told.hits, "%", 98.0, "least")
        section.add(f"{times} x: neither answered nor rejected", told.odd + learnt.odd, "", 0)
        section.note(f"{times} x: {told} with step messages, {learnt} without")


def _run(engine: Path, trace: Sequence[TraceRequest], transports: list[str] | None, outcome: RunFigures) -> None:
    """Add a run to `outcome`, on engines of its own, whose caches are empty."""
    table = planned("meta-llama/Llama-3.1-8B", "h100-sxm")
    paged = replace(
        table,
        steps=slower(table.steps, FACTOR),
        blocks=BLOCKS,
        max_batch_size=PLACES,
        max_num_tokens=CHUNK,
        noise=NOISE,
    )
    with engines(engine, paged, REPLICAS, transports=transports, slow={f"{NAME}-1": 2.0}) as stage:
        port = urlsplit(stage.server.metrics).port
        with front(stage.replicas, {**SETTINGS, "metrics_port": port}) as gateway:
            result = asyncio.run(replay(gateway.address, trace))
        outcome.cached += stage.reused() * paged.tokens_per_block
    outcome.in_time += sum(one.keeps(TTFT, TPOT) for one in result.requests)
    outcome.answered += len(result.ok)
    outcome.odd += sum(not one.ok and one.status != 503 for one in result.requests)
    outcome.prompt += sum(one.prompt for one in result.ok)


def _load(words: Sequence[int], times: int, seed: int) -> list[TraceRequest]:
    rate = times * FULL
    return Talks(rate=rate, sessions=round(rate * SECONDS), turns=1, seed=seed).asked(words)
