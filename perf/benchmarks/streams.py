"""Many streams, and long prompts beside short ones: `python -m llmops.perf.benchmarks.streams ENGINE`.

On the fountain, like hot_path. ENGINE is any engine folder; only its tokenizer and chat template are used.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from llmops.perf.bench import bench
from llmops.perf.fountain.repository import PLAIN
from llmops.perf.fountain.served import fountain
from llmops.perf.harness.figures import Section
from llmops.perf.harness.load import options, run
from llmops.perf.harness.processes import Footprint, footprint
from llmops.perf.harness.script import script
from llmops.perf.harness.stack import Service
from llmops.perf.load.loop import run_async
from llmops.perf.report.document import Document

SLOW = 0.2  # seconds per token where streams, not tokens, are to be counted
PERIOD = 0.02
LONG = 32_000  # tokens


def many_streams(front: Service, section: Section, streams: int = 1000) -> None:
    """Memory that `streams` open answers take in the gateway, and whether all of them end well."""
    run(front.address, output=4, concurrency=50, requests=200)
    before = footprint(front.pids)
    during, document = run_async(_peak(front, streams))
    section.add(f"errors, {streams:,} streams", document.summary.failed, "requests", 0)
    section.add("gateway memory per open stream", (during.memory - before.memory) / streams / 1024, "KiB", 64)
    section.add("gateway memory before", before.memory / 2**20, "MiB")


async def _peak(front: Service, streams: int) -> tuple[Footprint, Document]:
    # all streams are open for about half of the run; opening them one after another spares the listen queue
    load = options(front.address, output=100, rate=100.0, arrival="constant", requests=streams, warmup=0, timeout=120.0)
    task = asyncio.create_task(bench(load))
    peak = footprint(front.pids)
    while not task.done():
        await asyncio.sleep(1.0)
        peak = max(peak, footprint(front.pids), key=lambda seen: seen.memory)
    return peak, await task


def long_prompt(front: Service, section: Section, streams: int = 64) -> None:
    """ITL p99 of short streams alone, and while long prompts come in."""
    run(front.address, output=8, concurrency=streams, requests=2 * streams)
    alone, _ = run_async(_beside(front, streams, 0))
    beside, ttfts = run_async(_beside(front, streams, 3))
    assert alone.summary.itl is not None
    assert beside.summary.itl is not None
    section.add(f"ITL p99, {streams} streams, a token each {1e3 * PERIOD:g} ms", alone.summary.itl.p99, "ms")
    aim = 2 * alone.summary.itl.p99
    section.add(f"ITL p99 while {LONG:,}-token prompts come", beside.summary.itl.p99, "ms", aim)
    section.add("longest gap then", beside.summary.itl.maximum, "ms")
    section.add(f"TTFT of the {LONG:,}-token prompts, longest of {len(ttfts)}", max(ttfts), "ms")


async def _beside(front: Service, streams: int, prompts: int) -> tuple[Document, list[float]]:
    load = options(front.address, output=int(6.0 / PERIOD), concurrency=streams, requests=streams, warmup=0)
    short = asyncio.create_task(bench(load))
    await asyncio.sleep(1.0)
    ttfts = []
    for _ in range(prompts):
        long = await bench(options(front.address, LONG, 1, concurrency=1, requests=1, warmup=0))
        assert long.summary.ttft is not None, long.summary.errors
        ttfts.append(long.summary.ttft.p50)
    return await short, ttfts


def measure(engine: Path) -> Section:
    """All figures of this script."""
    text = "Fountain on the real Triton, gateway and load generator on the same machine."
    section = Section("Many streams, long prompts", "python -m llmops.perf.benchmarks.streams ENGINE", text)
    with section:
        with fountain(engine, SLOW) as (_, front):
            many_streams(front, section)
        with fountain(engine, PERIOD, text=PLAIN) as (_, front):
            long_prompt(front, section)
    return section


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure what many streams and long prompts do to the gateway.")()
