"""Many streams, long prompts, many requests, several workers: `python -m llmops.perf.endurance ENGINE`.

On the fountain, like perf/hot_path.py. ENGINE is any engine folder; only its tokenizer and chat template are used.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import click

from llmops.perf.bench import bench
from llmops.perf.fountain.repository import make_fountain
from llmops.perf.harness.figures import Section
from llmops.perf.harness.load import options, run
from llmops.perf.harness.processes import Footprint, footprint
from llmops.perf.harness.stack import Service, gateway, triton
from llmops.perf.load.loop import run_async
from llmops.perf.report.document import Document

SLOW = 0.2  # seconds per token where streams, not tokens, are to be counted
SOAK_REQUESTS = 100_000


def many_streams(front: Service, section: Section, streams: int = 1000) -> None:
    """Memory that `streams` open answers take in the gateway, and whether all of them end well."""
    run(front.address, output=4, concurrency=50, requests=200)
    before = footprint(front.pids)
    during, document = run_async(_peak(front, streams))
    section.add(f"errors, {streams:,} streams", document.summary.failed, "requests", 0)
    section.add("gateway memory per open stream", (during.memory - before.memory) / streams / 1024, "KiB", 64)


async def _peak(front: Service, streams: int) -> tuple[Footprint, Document]:
    # all streams are open for about half of the run; opening them one after another spares the listen queue
    load = options(front.address, output=150, rate=100.0, arrival="constant", requests=streams, warmup=0, timeout=120.0)
    task = asyncio.create_task(bench(load))
    peak = footprint(front.pids)
    while not task.done():
        await asyncio.sleep(1.0)
        peak = max(peak, footprint(front.pids), key=lambda seen: seen.memory)
    return peak, await task


def long_prompt(front: Service, section: Section, streams: int = 64) -> None:
    """ITL p99 of short streams alone, and while 32,000-token prompts come in."""
    alone, beside = run_async(_beside(front, streams, 0)), run_async(_beside(front, streams, 3))
    assert alone.summary.itl is not None
    assert beside.summary.itl is not None
    section.add(f"ITL p99, {streams} short streams alone", alone.summary.itl.p99, "ms")
    section.add("ITL p99 while 32,000-token prompts come", beside.summary.itl.p99, "ms", 2 * alone.summary.itl.p99)


async def _beside(front: Service, streams: int, prompts: int) -> Document:
    short = asyncio.create_task(
        bench(options(front.address, output=40, concurrency=streams, requests=streams, warmup=0))
    )
    await asyncio.sleep(2.0)
    for _ in range(prompts):
        long = await bench(options(front.address, 32_000, 1, concurrency=1, requests=1, warmup=0))
        assert long.summary.completed == 1, long.summary.errors
    return await short


def soak(front: Service, section: Section, requests: int) -> None:
    """Memory slope, threads and files over `requests`, some of which leave midway."""
    run(front.address, output=2, concurrency=64, requests=max(500, requests // 10), cancel_share=0.1)
    start = footprint(front.pids)
    seen: list[tuple[int, int]] = []
    failed = 0
    for done in range(0, requests, step := max(500, requests // 10)):
        document = run(front.address, output=2, concurrency=64, requests=step, warmup=0, cancel_share=0.1, seed=done)
        failed += document.summary.failed
        seen.append((done + step, footprint(front.pids).memory))
    time.sleep(2.0)
    end = footprint(front.pids)
    section.add(f"errors in {requests:,} requests", failed, "requests", 0)
    section.add("gateway memory slope", _slope(seen) / 1024, "KiB per 1,000 requests", 8)
    section.add("threads left", end.threads - start.threads, "threads", 0)
    section.add("files left", end.files - start.files, "files", 0)


def _slope(seen: list[tuple[int, int]]) -> float:
    """Bytes per thousand requests, least squares over the second half (caches fill in the first)."""
    points = seen[len(seen) // 2 :]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def measure(engine: Path, soak_requests: int = SOAK_REQUESTS) -> Section:
    """All figures of this script."""
    text = "Fountain on the real Triton, gateway and load generator on the same machine."
    section = Section("Endurance", "python -m llmops.perf.endurance ENGINE", text)
    with section, tempfile.TemporaryDirectory() as folder:
        slow, fast = Path(folder, "slow"), Path(folder, "fast")
        make_fountain(engine, slow, SLOW)
        with triton(slow) as server, gateway(server.address) as front:
            many_streams(front, section)
            long_prompt(front, section)
        make_fountain(engine, fast, 0.002)
        with triton(fast) as server, gateway(server.address) as front:
            soak(front, section, soak_requests)
    return section


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.option("--soak-requests", default=SOAK_REQUESTS, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here as well.")
def main(engine: Path, soak_requests: int, json_path: Path | None) -> None:
    """Measure what many streams, long prompts and many requests do to the gateway."""
    section = measure(engine, soak_requests)
    if json_path is not None:
        section.write_json(json_path)


if __name__ == "__main__":
    main()
