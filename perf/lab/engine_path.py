"""Overhead of Triton and the gateway compared with the engine alone.

Goals: 95 % of the throughput of OpenVINO's pipeline alone at 32 streams, and the first token of a
repeated prompt of 2,000 tokens in a fifth of the time. The systems run alternately on one machine
with the same load: 64 prompt tokens, 64 answer tokens, greedy.
"""

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmops.perf.lab.figures import Section
from llmops.process import with_parent_death_signal
from tests.support.load import run
from tests.support.stack import Service, engine_on_triton, gateway

ROUNDS = 2
#: Streams and requests of each round.
LOAD = (32, 64)
#: Streams and requests of the warm-up.
WARM_UP = (4, 8)
CONDITIONS = "64 prompt tokens, 64 answer tokens, greedy. The systems alternate in one run; medians of the rounds."

# Each prompt uses a new seed, because a repeated prompt would be in the engine's prefix cache.
_SEEDS = itertools.count(1)

Measure = Callable[[int, int], float]  # A function (streams, requests) -> output tokens/s.


@contextlib.contextmanager
def bare(engine: Path) -> Iterator[Measure]:
    """Start the bare pipeline in a separate process, and yield a function that measures it."""
    command = [sys.executable, "-m", "llmops.perf.lab.bare_engine", str(engine)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(with_parent_death_signal(command), stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert "ready" in child.stdout.readline(), "the bare pipeline did not start; see its output above"
        yield lambda streams, requests: _ask(child, f"{streams} {requests} 64 64\n")
    finally:
        child.stdin.close()
        child.wait()


def _ask(child: subprocess.Popen[str], line: str) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(line)
    child.stdin.flush()
    return float(json.loads(child.stdout.readline()))


def through_gateway(front: Service) -> Measure:
    def tokens_per_second(streams: int, requests: int) -> float:
        load: dict[str, Any] = {"concurrency": streams, "requests": requests, "warmup": 0, "seed": next(_SEEDS)}
        document = run(front.address, via="completions", extra={"temperature": 0}, **load)
        assert not document.summary.errors, document.summary.errors
        return float(document.summary.output_tokens_per_second)

    return tokens_per_second


def compare(systems: Sequence[Measure], section: Section) -> None:
    """Add to `section` the ratio of the gateway's median tokens/s to the bare pipeline's.

    The two systems run alternately, so that a change of the machine's load affects both.
    """
    for measure in systems:
        measure(*WARM_UP)
    rounds = [[measure(*LOAD) for measure in systems] for _ in range(ROUNDS)]
    gateway, bare = map(statistics.median, zip(*rounds, strict=True))
    section.add(f"gateway / bare pipeline, {LOAD[0]} streams", gateway / bare, "×", 0.95, "least")


def prefix_cache(front: Service, section: Section) -> None:
    """Add to `section` the TTFT of a repeated prompt of 2,000 tokens.

    The goal is a fifth of the TTFT at the first time.
    """
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(3):
        seed = next(_SEEDS)
        load: dict[str, Any] = {"concurrency": 1, "requests": 1, "warmup": 0, "via": "completions", "seed": seed}
        for times in (cold, warm):
            ttft = run(front.address, 2000, 4, **load).summary.ttft
            assert ttft is not None
            times.append(ttft.p50)
    section.add("TTFT, 2,000 tokens, warm prefix", statistics.median(warm), "ms", statistics.median(cold) / 5)


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`."""
    with bare(engine) as pipeline, engine_on_triton(engine) as server, gateway(server.address) as front:
        compare((through_gateway(front), pipeline), section)
        prefix_cache(front, section)
