"""Many open streams, and long prompts beside short streams.

Goals: 1,000 streams are open at once without an error, each with at most 64 KiB of the gateway's
memory. While prompts of 32,000 tokens arrive, the p99 inter-token latency of short streams at most
doubles.
"""

import asyncio
import time
from pathlib import Path

from llmops.perf.bench import bench
from llmops.perf.lab.figures import Section
from llmops.perf.load.runner import run_async
from llmops.perf.report.document import Document
from tests.support.load import options, run
from tests.support.mock_engine.repository import PLAIN
from tests.support.mock_engine.served import mock_engine
from tests.support.processes import Footprint, footprint
from tests.support.stack import Service

SLOW = 0.2  # Seconds per token where the number of streams matters, and not the token rate.
PERIOD = 0.02
LONG = 32_000  # Number of tokens of a long prompt.
CONDITIONS = "Mock engine on the real Triton, gateway and load generator on the same machine."


def many_streams(front: Service, section: Section, streams: int = 1000) -> None:
    """Add to `section` the figures of `streams` answers.

    The figures are the number of failures, the largest number of answers that were open at the same
    time, and the gateway's memory per answer.
    """
    run(front.address, output=4, concurrency=50, requests=200)
    before = footprint(front.pids)
    during, document = run_async(_peak(front, streams))
    section.add(f"errors, {streams:,} streams", document.summary.failed, "requests", 0)
    section.add("open at the same time", _most_open(document), "streams", 0.99 * streams, "least")
    section.add("gateway memory per open stream", (during.memory - before.memory) / streams / 1024, "KiB", 64)


async def _peak(front: Service, streams: int) -> tuple[Footprint, Document]:
    # Streams open one after another, so that the listen queue does not overflow, and all of them
    # are open for about half of the run.
    load = options(front.address, output=100, rate=100.0, arrival="constant", requests=streams, warmup=0, timeout=120.0)
    task = asyncio.create_task(bench(load))
    peak = footprint(front.pids)
    while not task.done():
        await asyncio.sleep(1.0)
        peak = max(peak, footprint(front.pids), key=lambda seen: seen.memory)
    return peak, await task


def _most_open(document: Document) -> int:
    """Return the largest number of answers that were open at the same time.

    An answer is open between its first and its last token.
    """
    moments = [(record["first"], 1) for record in document.records if record["first"] is not None]
    moments += [(record["end"], -1) for record in document.records if record["first"] is not None]
    most = now = 0
    for _, step in sorted(moments):
        now += step
        most = max(most, now)
    return most


def long_prompt(front: Service, section: Section, streams: int = 64) -> None:
    """Add to `section` the ITL p99 of short streams while long prompts arrive.

    The goal is twice the ITL p99 of the same streams alone.
    """
    run(front.address, output=8, concurrency=streams, requests=2 * streams)
    alone = run_async(_beside(front, streams, 0.0))
    beside = run_async(_beside(front, streams, 5.0))
    assert alone.summary.itl is not None
    assert beside.summary.itl is not None
    aim = 2 * alone.summary.itl.p99
    section.add(f"ITL p99 while {LONG:,}-token prompts come", beside.summary.itl.p99, "ms", aim)


async def _beside(front: Service, streams: int, seconds: float) -> Document:
    """Run short streams for six seconds, and long prompts beside them.

    Long prompts are sent one after another during the first `seconds`.
    """
    load = options(front.address, output=int(6.0 / PERIOD), concurrency=streams, requests=streams, warmup=0)
    short = asyncio.create_task(bench(load))
    await asyncio.sleep(0.5)
    seed, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        long = await bench(options(front.address, LONG, 1, concurrency=1, requests=1, warmup=0, seed=seed))
        assert long.summary.ttft is not None, long.summary.errors
        seed += 1
    return await short


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`."""
    with mock_engine(engine, SLOW) as (_, front):
        many_streams(front, section)
    with mock_engine(engine, PERIOD, text=PLAIN) as (_, front):
        long_prompt(front, section)
