"""Measured replicas beside reporting ones, on the real Triton: `python -m llmops.perf.lab.benchmarks.measured ENGINE`.

The same mock engines twice: with step messages, and with a gRPC stream per request and gauges alone, as NVIDIA's C++
backend. Steps are those of `llmops plan` for a 70B model on 8 H100, slowed down for two cores, with noise and prompts
in chunks; one replica is half as fast. The gateway knows none of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from llmops.contract import REQUEST_TRANSPORT
from llmops.perf.lab.fleet.replay import Went, replay
from llmops.perf.lab.fleet.stage import Engines, engines, front
from llmops.perf.lab.fleet.trace import Asked, Talks, words_of
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.mock_engine.planned import Paged, planned, slower
from llmops.perf.lab.mock_engine.repository import NAME

REPLICAS, PLACES, CHUNK, BLOCKS, SIZE = 2, 16, 512, 1024, 16
MODEL, GPU, TP, FACTOR, NOISE = "meta-llama/Llama-3.1-70B", "h100", 8, 4.0, 0.15
TTFT, TPOT = 0.5, 0.1
# requests per second that both answer in time, about
FULL = 4.0
SECONDS = 40.0
TIMES = (2.0, 10.0)
# of rounds of both, by turns; the seed of a round's requests is its number
ROUNDS = 2
ONE = Talks(rate=FULL, sessions=1, turns=1)
SLO = {"slo": {"ttft_p95": f"{1000 * TTFT:g}ms", "tpot_p95": f"{1000 * TPOT:g}ms"}}


def measure(engine: Path) -> Section:
    """All figures of this script."""
    text = (
        f"{REPLICAS} mock engines of {PLACES} sequences on the real Triton, one half as fast; steps as planned for "
        f"{MODEL} on {TP} {GPU}, {FACTOR:g} times as long, noise {NOISE:g}. Objectives: {1000 * TTFT:g} ms to the "
        f"first token, {1000 * TPOT:g} ms for each after it. {SECONDS:g} s of each load, {ROUNDS} rounds by turns."
    )
    section = Section("Replicas that report no state", "python -m llmops.perf.lab.benchmarks.measured ENGINE", text)
    words, slow = words_of(engine), {f"{NAME}-1": 2.0}
    with (
        section,
        engines(engine, _paged(), REPLICAS, slow=slow) as reported,
        engines(engine, _paged(), REPLICAS, slow=slow, transports=[REQUEST_TRANSPORT]) as measured,
    ):
        for times in TIMES:
            loads = [_load(words, times, seed) for seed in range(ROUNDS)]
            rounds = [(_run(reported, load), _run(measured, load)) for load in loads]
            _tell(section, f"{times:g} x", rounds)
    return section


def _tell(section: Section, name: str, rounds: Sequence[tuple[tuple[Went, float], tuple[Went, float]]]) -> None:
    good = [[_in_time(went) for went, _ in one] for one in rounds]
    reported, measured = (sum(side) for side in zip(*good, strict=True))
    section.add(f"{name}: goodput with step messages", reported / SECONDS / ROUNDS, "/s")
    section.add(f"{name}: goodput when measured, of that", 100 * measured / reported, "%", 95.0, "least")
    for at, (one, other) in enumerate(good):
        section.add(f"… in round {at + 1}", 100 * other / max(one, 1), "%")
    hits = [sum(rate for _, rate in side) / ROUNDS for side in zip(*rounds, strict=True)]
    section.add(f"{name}: prefix hits with step messages", 100 * hits[0], "%")
    section.add(f"{name}: prefix hits when measured, of that", 100 * hits[1] / hits[0], "%", 98.0, "least")
    for kind, side in zip(("with step messages", "measured"), zip(*rounds, strict=True), strict=True):
        late = max(went.of(lambda seen: seen.ttft, 95) for went, _ in side)
        section.add(f"{name}: TTFT p95 of those who are answered, {kind}", 1000 * late, "ms")
        lost = sum(not seen.ok and seen.status != 503 for went, _ in side for seen in went.seen)
        section.add(f"{name}: neither answered nor refused, {kind}", lost, "", 0)


def _paged() -> Paged:
    paged = planned(MODEL, GPU, TP)
    return replace(
        paged, steps=slower(paged.steps, FACTOR), blocks=BLOCKS, max_batch_size=PLACES, max_num_tokens=CHUNK,
        tokens_per_block=SIZE, noise=NOISE,
    )  # fmt: skip


def _load(words: Sequence[int], times: float, seed: int) -> list[Asked]:
    rate = times * FULL
    return replace(ONE, rate=rate, sessions=round(rate * SECONDS), seed=seed).asked(words)


def _run(stage: Engines, trace: Sequence[Asked]) -> tuple[Went, float]:
    """Also returns the share of the prompts' tokens that the engines found in their caches."""
    port, before = urlsplit(stage.server.metrics).port, stage.reused()
    with front(stage.replicas, {**SLO, "metrics_port": port}) as gateway:
        went = asyncio.run(replay(gateway.address, trace))
    return went, (stage.reused() - before) * SIZE / sum(len(one.asked.ids) for one in went.ok)


def _in_time(went: Went) -> int:
    return sum(one.keeps(TTFT, TPOT) for one in went.seen)


if __name__ == "__main__":
    script(measure, "ENGINE", "Compare measured replicas with reporting ones, with the tokenizer of ENGINE.")()
