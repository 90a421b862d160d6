"""Many requests, one after another: `python -m tests.faults.soak ENGINE`.

On the mock engine, like hot_path. ENGINE is any engine folder; only its tokenizer and chat template are used.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from llmops.perf.lab.figures import Section
from tests.support.load import run
from tests.support.mock_engine.served import mock_engine
from tests.support.processes import footprint
from tests.support.stack import Service

REQUESTS = 100_000
PERIOD = 0.002
USERS = 64
CANCELLED = 0.1  # share of the requests that leave midway
# the memory of CPython's allocator moves by a few MiB without a cause
NOISE_MIB = 8.0


def soak(front: Service, section: Section, requests: int) -> None:
    """Memory slope, threads and files over `requests`, some of which leave midway."""
    step = max(500, requests // 20)
    run(front.address, output=2, concurrency=USERS, requests=step, cancel_share=CANCELLED)
    start = footprint(front.pids)
    begun, seen, failed = time.monotonic(), list[tuple[int, int]](), 0
    for done in range(0, requests, step):
        load: dict[str, Any] = {
            "concurrency": USERS,
            "requests": step,
            "warmup": 0,
            "cancel_share": CANCELLED,
            "seed": done,
        }
        failed += run(front.address, output=2, **load).summary.failed
        seen.append((done + step, footprint(front.pids).memory))
    section.add("requests/s", requests / (time.monotonic() - begun), "requests/s")
    section.add(f"errors in {requests:,} requests", failed, "requests", 0)
    _memory(seen, section)
    time.sleep(2.0)
    end = footprint(front.pids)
    section.add("threads left", end.threads - start.threads, "threads", 0)
    section.add("files left", end.files - start.files, "files", 0)
    section.add("streams left, by the gateway's own count", front.metric(r"llmops_active_streams\{"), "streams", 0)


def _memory(seen: list[tuple[int, int]], section: Section) -> None:
    """Add the memory growth of the second half, by its slope.

    Caches fill up in the first half.
    """
    half = seen[len(seen) // 2 :]
    slope = _slope(half)
    section.add("gateway memory at the end", seen[-1][1] / 2**20, "MiB")
    section.add("slope over the second half", 1000 * slope / 1024, "KiB per 1,000 requests")
    section.add("which is over that half", slope * (half[-1][0] - half[0][0]) / 2**20, "MiB", NOISE_MIB)


def _slope(points: list[tuple[int, int]]) -> float:
    """Bytes per request, least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def measure(engine: Path, requests: int = REQUESTS) -> Section:
    """All figures of this script."""
    text = (
        f"Mock engine on the real Triton; {USERS} users, answers of 2 tokens, "
        f"{100 * CANCELLED:.0f} % of the requests leave midway."
    )
    section = Section(f"Soak, {requests:,} requests", text)
    with section, mock_engine(engine, PERIOD) as (_, front):
        soak(front, section, requests)
    return section


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.option("--requests", default=REQUESTS, show_default=True)
def main(engine: Path, requests: int) -> None:
    """Measure what many requests leave behind in the gateway."""
    measure(engine, requests)


if __name__ == "__main__":
    main()
