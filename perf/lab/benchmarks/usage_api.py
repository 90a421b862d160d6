"""What a question about usage takes, over HTTP and at the command line, where there are millions of requests:
`python -m llmops.perf.lab.benchmarks.usage_api [--rows N] [--on sqlite]`, on a real PostgreSQL and on SQLite."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import httpx
from sqlalchemy import func, select

from llmops.perf.lab.benchmarks.usage_rows import DAYS, TENANTS, USERS, fill
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.processes import cpu_seconds
from llmops.perf.lab.harness.servers import Postgres
from llmops.perf.percentiles import percentile
from llmops.store.factory import open_store
from llmops.store.tables import tenant_totals, usage_records, usage_totals

ROWS = 10_000_000
# keys that ask, which is what one process remembers anyhow
CALLERS, ASKED = 100, 500
AIM_MS = 20.0
STORES = ("PostgreSQL", "SQLite")
COMMANDS = (
    "usage",
    "usage --by day --by model",
    "usage --by user",
    "usage --tenant tenant-7 --by key",
    "usage reconcile",
)


def measure(rows: int = ROWS, stores: Sequence[str] = STORES) -> Section:
    section = Section("Usage over HTTP", "python -m llmops.perf.lab.benchmarks.usage_api", "")
    section.text = (
        f"`llmops control` on a store with {rows:,} requests of {USERS:,} users and keys of {TENANTS} tenants over "
        f"{DAYS} days; {CALLERS} keys ask in turns, one at a time. Then the same store from the command line, with "
        "the start of the program."
    )
    with section:
        for at, name in enumerate(stores):
            with _place(name) as url:
                _measure_on(name, url, rows, section)
            section.progress((at + 1) / len(stores))
    return section


@contextmanager
def _place(name: str) -> Iterator[str]:
    if name == "PostgreSQL":
        with Postgres() as server:
            yield server.url
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{Path(folder, 'store.db')}"


def _measure_on(name: str, url: str, rows: int, section: Section) -> None:
    secrets = asyncio.run(_fill(url, rows, section))[:CALLERS]
    with _control(url) as (address, pid):
        for question, path in _questions().items():
            _ask(section, f"{name}: {question}", address + path, secrets, pid)
    for command_ in COMMANDS:
        _run(section, f"{name}: llmops {command_}", [*command_.split(), "--store", url])


def _questions() -> dict[str, str]:
    begins = int((_now() - timedelta(days=DAYS)).timestamp())
    yesterday = int((_now() - timedelta(days=1)).timestamp())
    month = f"from={_now() - timedelta(days=DAYS):%Y-%m-%d}"
    costs, usage = "/v1/organization/costs", "/v1/organization/usage/completions"
    return {
        "GET /api/usage": f"/api/usage?{month}",
        "… by day and model": f"/api/usage?{month}&by=day&by=model",
        "… of the tenant, by day": f"/api/usage?of=tenant&{month}&by=day",
        "… of the tenant, by user": f"/api/usage?of=tenant&{month}&by=user",
        "organization/costs, 31 days": f"{costs}?start_time={begins}&limit=31",
        "organization/usage, 31 days by model": f"{usage}?start_time={begins}&limit=31&group_by=model",
        "organization/usage, 24 hours": f"{usage}?start_time={yesterday}&bucket_width=1h",
    }


async def _fill(url: str, rows: int, section: Section) -> list[str]:
    async with await open_store(url) as store:
        secrets = await fill(store, rows)
        async with store.read() as connection:
            tables = (usage_records, usage_totals, tenant_totals)
            counts = [await connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables]
    section.note(", ".join(f"{table.name}: {count:,} rows" for table, count in zip(tables, counts, strict=True)) + ".")
    return secrets


@contextmanager
def _control(store: str) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "llmops.cli", "control", "--port", "0", "--store", store]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait()


def _ask(section: Section, name: str, url: str, secrets: list[str], pid: int) -> None:
    dice, took = random.Random(1), []
    with httpx.Client(timeout=60) as client:
        for secret in secrets:
            # each key is looked up once and then cached
            client.get(url, headers={"authorization": f"Bearer {secret}"}).raise_for_status()
        before = cpu_seconds([pid])
        for _ in range(ASKED):
            headers = {"authorization": f"Bearer {dice.choice(secrets)}"}
            begun = time.perf_counter()
            client.get(url, headers=headers).raise_for_status()
            took.append(1000 * (time.perf_counter() - begun))
        cpu = 1000 * (cpu_seconds([pid]) - before) / ASKED
    section.add(f"{name}, p50", percentile(sorted(took), 50), "ms")
    section.add(f"{name}, p99", percentile(sorted(took), 99), "ms", AIM_MS)
    section.add(f"{name}, CPU of control", cpu, "ms")


def _run(section: Section, name: str, arguments: list[str]) -> None:
    command_, took = [sys.executable, "-m", "llmops.cli", *arguments], []
    for _ in range(3):
        begun = time.perf_counter()
        subprocess.run(command_, check=True, stdout=subprocess.DEVNULL)
        took.append(time.perf_counter() - begun)
    section.add(f"{name}, best of 3", min(took), "s")


def _now() -> datetime:
    return datetime.now(UTC)


@click.command()
@click.option("--rows", type=click.IntRange(1), default=ROWS, show_default=True)
@click.option("--on", "stores", type=click.Choice(STORES, case_sensitive=False), multiple=True, default=STORES)
def command(rows: int, stores: tuple[str, ...]) -> None:
    """Measure what questions about usage take."""
    print(measure(rows, stores).markdown())


if __name__ == "__main__":
    command()
