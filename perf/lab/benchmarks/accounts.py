"""What keys, limits and usage cost a gateway: `python -m llmops.perf.lab.benchmarks.accounts ENGINE`.

Three gateways on one Triton with the mock engine, by turns: without a store; with SQLite and the limits of one machine;
with PostgreSQL and Valkey. What counts is the difference within a round, because machines are noisy.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmops.perf.lab.benchmarks.hot_path import PERIOD
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import options, run, window
from llmops.perf.lab.harness.processes import CpuMeter, difference
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.servers import Postgres, Valkey
from llmops.perf.lab.harness.stack import Service, gateway
from llmops.perf.lab.mock_engine.repository import NAME, PLAIN
from llmops.perf.lab.mock_engine.served import served_mock_engine
from llmops.perf.load.event_loop import run_async

ROUNDS, REQUESTS, STREAMS = 3, 600, 64
# requests per second, at which nothing queues
CALM = 20.0
CALM_REQUESTS = 60
_SETTLE, _WINDOW = 2.0, 3.0
MANY = 1_000_000_000
KINDS = ("bare", "embedded", "shared")


@dataclass(frozen=True)
class Front:
    """A gateway, and the key that it asks for."""

    service: Service
    key: str | None


@dataclass(frozen=True)
class Round:
    """CPU in µs per request and per streamed token; latency of single requests in ms."""

    request: float
    token: float
    p50: float
    p99: float


def measure(engine: Path) -> Section:
    text = (
        "A key with requests and tokens per minute, places and a budget, of a tenant with all of these but places; 64 "
        f"tokens in. {ROUNDS} rounds of the three gateways by turns, medians of the differences within a round."
    )
    section = Section("Keys, limits and usage", "python -m llmops.perf.lab.benchmarks.accounts ENGINE", text)
    with section, fronts(engine) as known:
        _compare(known, section)
    return section


def _compare(known: dict[str, Front], section: Section) -> None:
    rounds: dict[str, list[Round]] = {name: [] for name in known}
    for turn in range(ROUNDS):
        # the second one finds the machine as the first one left it
        for name in sorted(known, reverse=bool(turn % 2)):
            rounds[name].append(one_round(known[name]))
        _add(rounds, section)
        section.progress((turn + 1) / (ROUNDS + 1))


def _add(rounds: dict[str, list[Round]], section: Section) -> None:
    bare = rounds["bare"]
    section.add("without a store: CPU", statistics.median(one.request for one in bare), "µs/request")
    section.add(f"without a store: CPU, {STREAMS} streams", statistics.median(one.token for one in bare), "µs/token")
    for name, told, most in (("embedded", "SQLite", 60.0), ("shared", "PostgreSQL and Valkey", 120.0)):
        pairs = list(zip(rounds[name], bare, strict=True))
        section.add(
            f"{told}: CPU of a request", statistics.median(a.request - b.request for a, b in pairs), "µs more", most
        )
        section.add(f"{told}: CPU of a token", statistics.median(a.token - b.token for a, b in pairs), "µs more", 0.2)
        latency = statistics.median(a.p50 - b.p50 for a, b in pairs), statistics.median(a.p99 - b.p99 for a, b in pairs)
        section.add(f"{told}: latency p50", latency[0], "ms more", 0.3)
        section.add(f"{told}: latency p99", latency[1], "ms more", 1.0)


def one_round(
    front: Front,
    requests: int = REQUESTS,
    streams: int = STREAMS,
    calm: float = CALM,
    calm_requests: int = CALM_REQUESTS,
) -> Round:
    """Requests at once, then single ones (`calm` per second), then streams."""
    url = front.service.address
    asked: dict[str, Any] = {"api_key": front.key, "model": NAME}
    run(url, output=1, concurrency=8, requests=32, stream=False, **asked)
    meter = CpuMeter({"gateway": front.service.pids})
    before = meter.read()
    run(url, output=1, concurrency=8, requests=requests, warmup=0, stream=False, **asked)
    request = 1e6 * difference(before, meter.read())["gateway"] / requests
    single = run(url, output=1, rate=calm, arrival="poisson", requests=calm_requests, warmup=4, stream=False, **asked)
    output = int((_SETTLE + _WINDOW + 1.0) / PERIOD)
    load = options(url, output=output, concurrency=streams, requests=streams, warmup=0, **asked)
    used, tokens, _ = run_async(window(load, meter, settle=_SETTLE, seconds=_WINDOW))
    assert single.summary.e2e is not None
    return Round(request, 1e6 * used["gateway"] / tokens, single.summary.e2e.p50, single.summary.e2e.p99)


@contextlib.contextmanager
def fronts(engine: Path, wanted: Sequence[str] = KINDS) -> Iterator[dict[str, Front]]:
    """The gateways that are wanted, ready, on one Triton."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(served_mock_engine(engine, PERIOD, first=0.001, text=PLAIN))
        known = {}
        for name in wanted:
            arguments: tuple[str, ...] = ()
            key = None
            if name != "bare":
                store, redis = f"sqlite:///{folder}/store.db", ""
                if name == "shared":
                    store = stack.enter_context(Postgres()).url
                    redis = f"redis: {stack.enter_context(Valkey()).url}\n"
                key, config = asyncio.run(account(store)), folder / f"{name}.yaml"
                config.write_text(f"store: {store}\nusage: {{journal: {folder}/{name}}}\n{redis}")
                arguments = "--config", str(config)
            known[name] = Front(stack.enter_context(gateway(server.address, *arguments)), key)
        yield known


async def account(url: str) -> str:
    """A key with every limit, of a tenant with every limit, for a model with a price."""
    from llmops.store.accounts.keys import KeySpec, create_key
    from llmops.store.accounts.limits import Budget, Limits
    from llmops.store.accounts.tenants import create_tenant
    from llmops.store.accounts.users import ensure_user
    from llmops.store.audit import AuditContext
    from llmops.store.factory import open_store
    from llmops.store.prices import Price, set_price

    by, budget = AuditContext("bench", datetime.now(UTC)), Budget(10**14, "month")
    async with await open_store(url, pool_size=1) as store, store.write() as connection:
        await create_tenant(connection, "bench", Limits(MANY, MANY, None, budget), by)
        user = await ensure_user(connection, "bench", "bench@localhost", by)
        _, key = await create_key(connection, user, KeySpec(limits=Limits(MANY, MANY, MANY, budget)), by)
        await set_price(connection, Price(NAME, by.at, 600_000, 300_000, 900_000), by)
    return key


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure what keys, limits and usage cost, with the tokenizer of ENGINE.")()
