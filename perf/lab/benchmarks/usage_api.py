"""What a question about usage takes, on a real PostgreSQL with millions of requests: `python -m
llmops.perf.lab.benchmarks.usage_api [--rows N]`."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import asyncpg
import click
import httpx

from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.processes import cpu_seconds
from llmops.perf.lab.harness.servers import Postgres
from llmops.perf.quantiles import percentile
from llmops.store.accounts.keys import SCOPES, KeySpec, create_key
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.audit import By
from llmops.store.open import open_store

ROWS, USERS, TENANTS, DAYS, MODELS = 10_000_000, 10_000, 100, 30, 4
CALLERS, ASKED = 100, 500
AIM_MS = 20.0
# each user's requests are spread over all days and models; ids grow with time, as those of events do
FILL = f"""
INSERT INTO usage_records (id, user_id, model, input_tokens, output_tokens, cached_tokens, cost_micros, request_id,
                           created_at, key_id, gateway_id, seq, status)
SELECT lpad(to_hex(n), 32, '0')::uuid, u.id, 'model-' || (n / {USERS}) % {MODELS}, 100 + n % 900, 10 + n % 300, n % 100,
       n % 700, 'chatcmpl-' || n, $1::timestamptz + (n::float / $2) * interval '{DAYS} days', u.key,
       'gateway-' || n % 4, n / 4, 200
FROM generate_series($3::bigint, $4::bigint - 1) AS n
JOIN bench_users u ON u.at = (n * 7919) % {USERS}
"""
SUMS = ", ".join(
    f"sum({name})" for name in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost_micros")
)
TOTALS = f"""
INSERT INTO usage_totals SELECT user_id, (created_at AT TIME ZONE 'UTC')::date, model, key_id, count(*), {SUMS}
FROM usage_records GROUP BY 1, 2, 3, 4
"""
TENANT_TOTALS = """
INSERT INTO tenant_totals SELECT u.tenant_id, t.day, t.model, sum(t.requests), sum(t.input_tokens),
       sum(t.cached_tokens), sum(t.output_tokens), sum(t.reasoning_tokens), sum(t.cost_micros)
FROM usage_totals t JOIN users u ON u.id = t.user_id GROUP BY 1, 2, 3
"""
OTHERS = f"""
INSERT INTO users (id, email, tenant_id)
SELECT gen_random_uuid(), 'user-' || n || '@bench', 'tenant-' || n % {TENANTS}
FROM generate_series({CALLERS}, {USERS} - 1) AS n;
INSERT INTO api_keys (hash, id, prefix, user_id, tier, scopes)
SELECT encode(sha256(email::bytea), 'hex'), 'key-' || substr(md5(email), 1, 12), 'sk-llmops-be', id, 'free',
       '["inference"]' FROM users WHERE email LIKE 'user-%@bench' AND id NOT IN (SELECT user_id FROM api_keys);
CREATE TABLE bench_users AS
SELECT (row_number() OVER () - 1)::bigint AS at, u.id, k.id AS key FROM users u JOIN api_keys k ON k.user_id = u.id;
CREATE INDEX ON bench_users (at);
"""


def measure(rows: int = ROWS) -> Section:
    section = Section("Usage over HTTP", "python -m llmops.perf.lab.benchmarks.usage_api", "")
    section.text = (
        f"`llmops control` on PostgreSQL with {rows:,} requests of {USERS:,} users and keys of {TENANTS} tenants over "
        f"{DAYS} days; {CALLERS} keys ask in turns, one at a time."
    )
    with section, Postgres() as server:
        secrets = asyncio.run(_fill(server.url, rows, section))
        with _control(server.url) as (url, pid):
            for name, path in _questions().items():
                _ask(section, name, url + path, secrets, pid)
    return section


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
    """The secrets of the keys that ask."""
    by, secrets = By("benchmark", _now()), []
    async with await open_store(url) as store, store.write() as connection:
        for at in range(TENANTS):
            await create_tenant(connection, f"tenant-{at}", Limits(), by)
        for at in range(CALLERS):
            user = await ensure_user(connection, f"tenant-{at % TENANTS}", f"user-{at}@bench", by)
            secrets.append((await create_key(connection, user, KeySpec(scopes=SCOPES), by))[1])
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(OTHERS)
        begun, begins = time.monotonic(), _now() - timedelta(days=DAYS)
        indexes = await _without_indexes(connection)
        step = max(rows // 20, 1)
        for first in range(0, rows, step):
            await connection.execute(FILL, begins, float(rows), first, min(first + step, rows), timeout=None)
            print(f"  {first + step:,} rows after {time.monotonic() - begun:.0f} s", flush=True)
        for statement in (*indexes, TOTALS, TENANT_TOTALS, "VACUUM ANALYZE"):
            await connection.execute(statement)
        for table in ("usage_records", "usage_totals", "tenant_totals"):
            section.note(f"{table}: {await connection.fetchval(f'SELECT count(*) FROM {table}'):,} rows")
    finally:
        await connection.close()
    return secrets


async def _without_indexes(connection: asyncpg.Connection) -> list[str]:
    """Drop the records' indexes, which are rebuilt faster than kept up; returns the statements that rebuild them."""
    rows = await connection.fetch("SELECT * FROM pg_indexes WHERE tablename = 'usage_records' AND indexname ~ '^idx'")
    for row in rows:
        await connection.execute(f"DROP INDEX {row['indexname']}")
    return [row["indexdef"] for row in rows]


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


def _now() -> datetime:
    return datetime.now(timezone.utc)


@click.command()
@click.option("--rows", type=click.IntRange(1), default=ROWS, show_default=True)
def command(rows: int) -> None:
    """Measure what questions about usage take on PostgreSQL."""
    print(measure(rows).markdown())


if __name__ == "__main__":
    command()
