"""The stack against its bare engine: `python -m llmops.perf.lab.engine_path ENGINE`.

Same machine, same load (64 tokens in, 64 out, greedy, end of text ignored), by turns in one run: OpenVINO's pipeline
without anything around it, and the same engine through Triton and the gateway.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from llmops.model_repository.server.processes import with_parent_death_signal
from llmops.perf.lab.figures import Section
from tests.support.load import STREAMS, run
from tests.support.stack import Service, engine_on_triton, gateway

ROUNDS = 2
WARM_UP = (4, 8)
COMPARING = 0.9  # share of the part's time; the prefix cache takes the rest
# against the bare pipeline at 32 streams
BARE_AIM = 0.95

# prompts that were sent before would be in the engine's prefix cache
_SEEDS = itertools.count(1)

Measure = Callable[[int, int], float]  # (streams, requests) -> output tokens/s


@contextlib.contextmanager
def bare(engine: Path) -> Iterator[Measure]:
    """The pipeline in a process of its own."""
    command = [sys.executable, "-m", "llmops.perf.lab.bare_engine", str(engine)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(with_parent_death_signal(command), stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert "ready" in child.stdout.readline(), "the bare pipeline did not start"
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


@contextlib.contextmanager
def served(engine: Path) -> Iterator[tuple[Service, Service]]:
    """The same engine on the real Triton, and the gateway."""
    with engine_on_triton(engine) as server, gateway(server.address) as front:
        yield server, front


def through_gateway(front: Service) -> Measure:
    return lambda streams, requests: _tokens_per_second(front.address, "completions", streams, requests)


def through_grpc(server: Service) -> Measure:
    return lambda streams, requests: _tokens_per_second(f"grpc://{server.address}", "engine", streams, requests)


def _tokens_per_second(url: str, via: str, streams: int, requests: int) -> float:
    load: dict[str, Any] = {"concurrency": streams, "requests": requests, "warmup": 0, "seed": next(_SEEDS)}
    document = run(url, via=via, extra={"temperature": 0}, **load)
    assert not document.summary.errors, document.summary.errors
    return document.summary.output_tokens_per_second


def compare(systems: dict[str, Measure], section: Section) -> None:
    """Median tokens/s of each system; the systems take turns. Every figure is there after the first round, and each
    measurement tells how long the rest will take on this machine."""
    plan = [WARM_UP, *[*STREAMS.items()] * ROUNDS]
    whole, done = len(systems) * sum(map(_work, plan)), 0.0
    rounds: dict[int, list[dict[str, float]]] = {streams: [] for streams, _ in plan}
    for load in plan:
        found: dict[str, float] = {}
        for name, measure in systems.items():
            found[name] = measure(*load)
            done += _work(load)
            section.progress(COMPARING * done / whole)
        rounds[load[0]].append(found)
        if load != WARM_UP:
            medians = {name: statistics.median(one[name] for one in rounds[load[0]]) for name in systems}
            _report(load[0], medians, section)


def _work(load: tuple[int, int]) -> float:
    """How long (streams, requests) take, up to a factor: throughput grows about as the root of the streams."""
    streams, requests = load
    return requests / math.sqrt(streams)


def prefix_cache(front: Service, section: Section) -> None:
    """TTFT of a 2,000-token prompt, cold and repeated."""
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(3):
        seed = next(_SEEDS)
        load: dict[str, Any] = {"concurrency": 1, "requests": 1, "warmup": 0, "via": "completions", "seed": seed}
        for times in (cold, warm):
            ttft = run(front.address, 2000, 4, **load).summary.ttft
            assert ttft is not None
            times.append(ttft.p50)
    section.add("TTFT, 2,000 tokens, cold", statistics.median(cold), "ms")
    section.add("TTFT, 2,000 tokens, warm prefix", statistics.median(warm), "ms", statistics.median(cold) / 5)


def measure(engine: Path) -> Section:
    """All figures of this script."""
    text = "64 tokens in, 64 out, greedy; by turns in one run, the median of the rounds."
    section = Section("Engine path", "python -m llmops.perf.lab.engine_path ENGINE", text)
    with section, contextlib.ExitStack() as stack:
        systems = {"bare pipeline": stack.enter_context(bare(engine))}
        server, front = stack.enter_context(served(engine))
        systems |= {"Triton gRPC": through_grpc(server), "gateway": through_gateway(front)}
        compare(systems, section)
        prefix_cache(front, section)
    return section


def _report(streams: int, rates: dict[str, float], section: Section) -> None:
    for name, rate in rates.items():
        section.add(f"{name}, {streams} streams", rate, "tokens/s")
    aim = BARE_AIM if streams == max(STREAMS) else None
    ratio = rates["gateway"] / rates["bare pipeline"]
    section.add(f"gateway / bare pipeline, {streams} streams", ratio, "×", aim, "least")


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
def main(engine: Path) -> None:
    """Measure ENGINE bare, through Triton and through the gateway."""
    measure(engine)


if __name__ == "__main__":
    main()
