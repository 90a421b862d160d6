"""The parts of docs/performance.md, in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmops.build.checkpoint.bundled_models import bundled_path
from llmops.errors import MissingDependencyError
from llmops.perf.lab.harness.figures import Section

# of the 100,000 that the part alone sends
SOAK_SLICE = 30_000


@dataclass(frozen=True)
class Part:
    """One section. `seconds`: what it gets before it is ended; a whole run leaves out parts that are not `included`."""

    name: str
    seconds: int
    measure: Callable[[Path], Section]
    included: bool = True
    peer: str | None = None  # of perf/lab/peers/environment.py

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "-")


def parts() -> list[Part]:
    """In the order of the page. Each takes the engine folder; imports are late: each runs in a process of its own."""
    return [
        Part("hot path", 280, _hot_path),
        Part("layers", 120, _layers),
        Part("engine path", 280, _engine_path, peer="llamacpp"),
        Part("Dynamo", 180, _dynamo, peer="dynamo"),
        Part("streams", 150, _streams),
        Part("soak", 180, lambda engine: _soak(engine, SOAK_SLICE)),
        Part("full soak", 600, lambda engine: _soak(engine, None), included=False),
        Part("load generator", 150, _load_generator, peer="aiperf"),
        Part("sweep", 180, _sweep),
        Part("usage", 240, _usage),
        Part("telling", 40, _telling),
        Part("balancers", 120, _balancers, included=False),
        Part("usage API", 1800, _usage_api, included=False),
        Part("Kafka away", 1500, _kafka_away, included=False),
        Part("start-up", 240, _start_up),
        Part("accounts", 240, _accounts),
        Part("door", 60, _door),
        Part("LiteLLM", 240, _litellm, peer="litellm"),
        Part("planner", 120, _planner),
        Part("policies", 240, _policies),
        Part("overload", 480, _overload, included=False),
        Part("simulator", 420, _simulator, included=False),
        Part("routers", 900, _routers, included=False, peer="dynamo"),
    ]


def _hot_path(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import hot_path

    return hot_path.measure(engine)


def _layers(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import layers

    return layers.measure(engine)


def _engine_path(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import engine_path

    return engine_path.measure(engine, _gguf())


def _gguf() -> Path | None:
    try:
        return bundled_path("smollm2")
    except MissingDependencyError:
        return None


def _dynamo(engine: Path) -> Section:
    from llmops.perf.lab.peers import dynamo

    return dynamo.measure(engine)


def _streams(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import streams

    return streams.measure(engine)


def _soak(engine: Path, requests: int | None) -> Section:
    from llmops.perf.lab.benchmarks import soak

    return soak.measure(engine, requests or soak.REQUESTS)


def _load_generator(engine: Path) -> Section:
    from llmops.perf.lab.peers import aiperf

    return aiperf.measure(engine / "tokenizer")


def _sweep(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import sweep

    return sweep.measure(engine)


def _usage(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import usage

    return usage.measure()


def _balancers(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import balancers

    return balancers.measure(engine)


def _telling(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import telling

    return telling.measure()


def _start_up(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import start_up

    return start_up.measure(engine / "tokenizer")


def _accounts(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import accounts

    return accounts.measure(engine)


def _door(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import door

    return door.measure()


def _litellm(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import beside_litellm

    return beside_litellm.measure(engine)


def _usage_api(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import usage_api

    return usage_api.measure()


def _kafka_away(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import kafka_away

    return kafka_away.measure(engine)


def _planner(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import planner

    return planner.measure()


def _policies(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import policies

    return policies.measure()


def _overload(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import overload

    return overload.measure(engine)


def _simulator(engine: Path) -> Section:
    from llmops.perf.lab.benchmarks import simulator

    return simulator.measure(engine)


def _routers(engine: Path) -> Section:
    from llmops.perf.lab.peers import routing

    return routing.measure(engine)
