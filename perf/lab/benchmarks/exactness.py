"""Whether limits are exact: processes that take all they can get, on one machine and on one Valkey."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.servers import Valkey

ATTEMPTS, LIMIT = 10_000, 3000


def measure(section: Section) -> None:
    """The share of limit and refill that was given, in percent: more than 100 is too much."""
    with tempfile.TemporaryDirectory() as folder:
        _add(section, "4 workers of one machine", _asked(4, f"{folder}/limits"))
    with Valkey() as valkey:
        _add(section, "3 gateways on one Valkey", _asked(3, valkey.url))


def _add(section: Section, who: str, told: list[tuple[int, float, float]]) -> None:
    given = sum(got for got, _, _ in told)
    seconds = max(end for _, _, end in told) - min(begin for _, begin, _ in told)
    share = 100 * given / (LIMIT + seconds * LIMIT / 60 + 1)
    what = f"{who}, {ATTEMPTS:,} attempts on one key at once"
    section.add(f"{what}: given of limit and refill", share, "%", 100)
    section.add(f"{what}: used of the limit", 100 * given / LIMIT, "%", 99, "least")


def _asked(processes: int, where: str) -> list[tuple[int, float, float]]:
    """How many each process got, when it began and when it ended."""
    command = [sys.executable, "-m", "llmops.perf.lab.benchmarks.exactness", where, str(ATTEMPTS // processes)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [tuple(json.loads(process.communicate(timeout=100)[0])) for process in started]  # type: ignore[misc]
    finally:
        for process in started:
            process.kill()
            process.wait()


async def _ask(where: str, attempts: int) -> None:
    """One of them: all its attempts are open at once."""
    from time import monotonic

    from llmops.gateway.callers.limits.base import Limiter
    from llmops.gateway.callers.limits.buckets import Ask, Bound
    from llmops.gateway.callers.limits.embedded import Embedded
    from llmops.gateway.callers.limits.redis import Shared

    # no process may fall back to counting by itself: that would show up as too much
    limiter: Limiter = Embedded(where, patience=30)
    if "://" in where:
        limiter = Shared(where, Embedded(":memory:"), patience=30)
    await limiter.start()
    bounds, asks = [Bound("key", LIMIT)], [Ask(1)]
    await limiter.reserve(bounds, [Ask()])
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began = monotonic()
    asked = await asyncio.gather(*(limiter.reserve(bounds, asks) for _ in range(attempts)))
    ended = monotonic()
    assert all(one.by is limiter for one in asked), "not counted together"
    print(json.dumps([sum(one.decision.lacking is None for one in asked), began, ended]), flush=True)
    await limiter.close()


if __name__ == "__main__":
    asyncio.run(_ask(str(Path(sys.argv[1])) if "://" not in sys.argv[1] else sys.argv[1], int(sys.argv[2])))
