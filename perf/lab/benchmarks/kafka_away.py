"""Kafka that is away while requests come: `python -m llmops.perf.lab.benchmarks.kafka_away ENGINE [--seconds 600]`.

A whole gateway with PostgreSQL, on the real Triton with the mock engine, and `llmops control` as the ledger. The
broker is started when the time is over. The same at the journal's door, where no HTTP bounds the rate, is in `usage`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from sqlalchemy import func, select

from llmops.perf.lab.benchmarks.accounts import account
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import run
from llmops.perf.lab.harness.processes import footprint
from llmops.perf.lab.harness.servers import Broker, Postgres
from llmops.perf.lab.harness.stack import Service, gateway, process
from llmops.perf.lab.mock_engine.repository import NAME
from llmops.perf.lab.mock_engine.served import served_mock_engine
from llmops.store.factory import open_store
from llmops.store.tables import usage_records

SECONDS, RATE, USERS = 600, 500, 16
SIGNING = "0123456789abcdef" * 2
# requests before memory is looked at: Kafka is away by then, and caches are filled
WARM = 3000
PERIOD = 0.002
ARRIVAL_SECONDS = 600.0
GROWTH_MIB = 8.0


@dataclass
class Stage:
    """A gateway whose broker has yet to be started."""

    front: Service
    key: str
    store: str
    broker: Broker
    journal: Path
    asked: int = 0
    failed: int = 0
    memory: list[int] = field(default_factory=list)

    def ask(self, requests: int) -> None:
        """Not more than RATE a second."""
        begun = time.monotonic()
        load: dict[str, Any] = {"api_key": self.key, "model": NAME, "stream": False, "seed": self.asked}
        summary = run(self.front.address, output=1, concurrency=USERS, requests=requests, warmup=0, **load).summary
        self.asked += requests
        self.failed += summary.failed
        self.memory.append(footprint(self.front.pids).memory)
        time.sleep(max(0.0, requests / RATE - (time.monotonic() - begun)))

    def journal_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.journal.rglob("*.journal"))


def measure(engine: Path, seconds: float = SECONDS) -> Section:
    command = f"python -m llmops.perf.lab.benchmarks.kafka_away ENGINE --seconds {seconds:.0f}"
    text = (
        f"At most {RATE} requests a second, {USERS} at a time, 64 tokens in, 1 out, for {seconds:.0f} s without a "
        "broker, which then starts. A key with every limit, PostgreSQL; all of it shares the machine's cores."
    )
    section = Section("Kafka away", command, text)
    with section, _stage(engine) as stage:
        _while_away(stage, seconds, section)
        with stage.broker:
            _until_there(stage, section)
    return section


@contextlib.contextmanager
def _stage(engine: Path) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(served_mock_engine(engine, PERIOD))
        store, broker = stack.enter_context(Postgres()).url, Broker()
        key, config = asyncio.run(account(store)), folder / "config.yaml"
        config.write_text(
            f"store: {store}\nkafka: {{servers: {broker.servers}, signing_keys: {SIGNING}}}\n"
            f"usage: {{journal: {folder}/usage}}\n"
        )
        control = [sys.executable, "-m", "llmops.cli", "control", "--port", "0", "--config", str(config)]
        stack.enter_context(process(control, r"listens on (http://\S+)"))
        front = stack.enter_context(gateway(server.address, "--config", str(config)))
        yield Stage(front, key, store, broker, folder / "usage")


def _while_away(stage: Stage, seconds: float, section: Section) -> None:
    stage.ask(WARM)
    begun, before = time.monotonic(), stage.asked
    while (over := time.monotonic() - begun) < seconds:
        stage.ask(10 * RATE)
        section.progress(min(1.0, over / seconds) / 2)
    section.add("requests a second", (stage.asked - before) / (time.monotonic() - begun), "requests/s")
    section.add("requests while it was away", stage.asked, "requests")
    section.add("of them failed", stage.failed, "requests", 0)
    section.add("gateway, memory", (stage.memory[-1] - stage.memory[0]) / 2**20, "MiB more", GROWTH_MIB)
    section.add("journal", stage.journal_bytes() / 2**20, "MiB")


def _until_there(stage: Stage, section: Section) -> None:
    begun = time.monotonic()
    rows, requests = asyncio.run(_arrived(stage))
    section.add("until the ledger had them", time.monotonic() - begun, "s")
    section.add("of them lost", stage.asked - stage.failed - requests, "requests", 0)
    section.add("of them billed twice", rows - requests, "requests", 0)


async def _arrived(stage: Stage) -> tuple[int, int]:
    """Rows, and requests that they are of, once nothing more comes."""
    deadline = time.monotonic() + ARRIVAL_SECONDS
    async with await open_store(stage.store, pool_size=1) as store:
        rows = -1
        while rows < stage.asked - stage.failed and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            async with store.read() as connection:
                rows = await connection.scalar(select(func.count()).select_from(usage_records)) or 0
        async with store.read() as connection:
            count = select(func.count(), func.count(usage_records.c.request_id.distinct()))
            found, requests = (await connection.execute(count)).one()
    return found, requests


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.option("--seconds", default=SECONDS, show_default=True)
def main(engine: Path, seconds: float) -> None:
    """Measure a gateway whose Kafka is away."""
    measure(engine, seconds)


if __name__ == "__main__":
    main()
