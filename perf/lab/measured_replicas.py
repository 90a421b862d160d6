"""Replicas that report nothing beside replicas that report each step, on the real Triton.

The step times are NVIDIA's measured tables for Llama 3.1 8B on an H100, made longer so that few
cores carry them, with noise and prompts read in chunks; one of three replicas is twice as slow. No
gateway knows any of this. Goals: at 2 and 10 times the capacity, replicas that report nothing
answer 95 % as many requests in time, and find within 2 % as many tokens of prompts in their caches.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmops.perf.lab.figures import Section
from llmops.perf.lab.open_load import OpenLoad, is_in_time, is_rejected, words_of
from llmops.perf.load.runner import run_async
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
                _run(engine, OpenLoad(words, times * FULL, SECONDS, seed), transports, outcome)
        section.add(f"{times} x: without, relative", 100 * learnt.in_time / told.in_time, "%", 95.0, "least")
        section.add(f"{times} x: prefix hits without, relative", 100 * learnt.hits / told.hits, "%", 98.0, "least")
        section.add(f"{times} x: neither answered nor rejected", told.odd + learnt.odd, "", 0)
        section.note(f"{times} x: {told} with step messages, {learnt} without")


def _run(engine: Path, load: OpenLoad, transports: list[str] | None, outcome: RunFigures) -> None:
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
            records = run_async(load.send(gateway.address))
        outcome.cached += stage.reused() * paged.tokens_per_block
    outcome.in_time += sum(is_in_time(one, TTFT, TPOT) for one in records)
    outcome.odd += sum(not one.ok and not is_rejected(one) for one in records)
    outcome.prompt += sum(one.tokens_in or 0 for one in records if one.ok)
