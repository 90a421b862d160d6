"""A store with a month of usage, made by the database itself: ten million requests in minutes."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.accounts.key_secrets import VISIBLE_PREFIX_LENGTH, hash_secret, new_secret
from llmops.store.accounts.keys import SCOPES, KeySpec
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.audit import AuditContext
from llmops.store.database import Store
from llmops.store.tables import api_keys, usage_records, users
from llmops.store.usage_writes import SUMMED

USERS, TENANTS, DAYS, MODELS, GATEWAYS = 10_000, 100, 30, 4, 4
# statements that the records are made in
PIECES = 20
# of ids that mean somebody else
FIRST_USER = 1000
# what is not said in the same way to both
_WORDS = {
    "postgresql": {
        "numbers": "SELECT generate_series(CAST({first} AS bigint), {behind} - 1)",
        "uuid": "CAST(lpad(to_hex({}), 32, '0') AS uuid)",
        "at": "to_timestamp({begins} + n * {seconds} / {rows})",
        "day": "CAST(created_at AT TIME ZONE 'UTC' AS date)",
    },
    "sqlite": {
        "numbers": "SELECT {first} UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < {behind}",
        "uuid": "printf('00000000-0000-0000-0000-%012x', {})",
        "at": "datetime({begins} + n * {seconds} / {rows}, 'unixepoch') || printf('.%06d', n % 1000000)",
        "day": "date(created_at)",
    },
}
# a user's requests are spread over all days and models; ids grow with time, as those of events do
_RECORDS = """
INSERT INTO usage_records (id, user_id, key_id, model, input_tokens, output_tokens, cached_tokens, cost_micros,
                           request_id, created_at, gateway_id, seq, status)
WITH RECURSIVE numbers (n) AS ({numbers})
SELECT {id}, {user}, 'key-' || ((n * 7919) % {users}), 'model-' || ((n / {users}) % {models}), 100 + n % 900,
       10 + n % 300, n % 100, n % 700, 'chatcmpl-' || n, {at}, 'gateway-' || (n % {gateways}), n / {gateways}, 200
FROM numbers
"""
_SUMS = ", ".join(f"sum(t.{name})" for name in SUMMED)
# in the order in which they come about: those of one user are far from each other
_TOTALS = """
INSERT INTO usage_totals SELECT user_id, {day}, model, key_id, count(*), {sums} FROM usage_records t
GROUP BY 1, 2, 3, 4 ORDER BY 2
"""
_TENANT_TOTALS = f"""
INSERT INTO tenant_totals SELECT u.tenant_id, t.day, t.model, {_SUMS}
FROM usage_totals t JOIN users u ON u.id = t.user_id GROUP BY 1, 2, 3 ORDER BY 2
"""
_MARKS = "INSERT INTO gateways SELECT gateway_id, max(seq) + 1 FROM usage_records GROUP BY 1"


async def fill(store: Store, rows: int) -> list[str]:
    """`rows` requests of the last DAYS days, with their sums and the gateways' marks. Returns the secrets of USERS
    keys, each of a user of its own; they have all scopes."""
    begun, now = time.monotonic(), datetime.now(UTC)
    async with store.write() as connection:
        secrets = await _accounts(connection, now)
        dialect = connection.dialect.name
        # built faster than kept up
        await connection.run_sync(_drop_indexes)
    for statement in _statements(dialect, rows, int((now - timedelta(days=DAYS)).timestamp())):
        async with store.write() as connection:
            await connection.execute(text(statement))
        print(f"  {statement.split()[2]}, {time.monotonic() - begun:.0f} s", flush=True)
    async with store.write() as connection:
        await connection.run_sync(_create_indexes)
    if dialect == "postgresql":
        # as its autovacuum does, in no transaction; SQLite has none
        async with store.read() as connection:
            await connection.execute(text("VACUUM ANALYZE"))
    return secrets


async def _accounts(connection: AsyncConnection, now: datetime) -> list[str]:
    for at in range(TENANTS):
        await create_tenant(connection, f"tenant-{at}", Limits(), AuditContext("benchmark", now))
    secrets = [new_secret() for _ in range(USERS)]
    columns = KeySpec(scopes=SCOPES).columns()
    of_users, of_keys = [], []
    for at, secret in enumerate(secrets):
        user = str(UUID(int=FIRST_USER + at))
        of_users.append({"id": user, "email": f"user-{at}@bench", "tenant_id": f"tenant-{at % TENANTS}"})
        key = {
            "id": f"key-{at}",
            "hash": hash_secret(secret),
            "prefix": secret[:VISIBLE_PREFIX_LENGTH],
            "user_id": user,
        }
        of_keys.append(key | {"created_at": now} | columns)
    await connection.execute(users.insert(), of_users)
    await connection.execute(api_keys.insert(), of_keys)
    return secrets


def _drop_indexes(connection: Connection) -> None:
    for index in usage_records.indexes:
        index.drop(connection)


def _create_indexes(connection: Connection) -> None:
    for index in usage_records.indexes:
        index.create(connection)


def _statements(dialect: str, rows: int, begins: int) -> list[str]:
    words, step = _WORDS[dialect], -(-rows // PIECES)
    at = words["at"].format(begins=begins, seconds=DAYS * 86_400, rows=rows)
    user = words["uuid"].format(f"(n * 7919) % {USERS} + {FIRST_USER}")
    plain = {"id": words["uuid"].format("n"), "user": user, "at": at}
    plain |= {"users": str(USERS), "models": str(MODELS), "gateways": str(GATEWAYS)}
    records = [
        _RECORDS.format(numbers=words["numbers"].format(first=first, behind=min(first + step, rows)), **plain)
        for first in range(0, rows, step)
    ]
    sums = ", ".join(f"sum(t.{name})" for name in SUMMED[1:])
    return [*records, _TOTALS.format(day=words["day"], sums=sums), _TENANT_TOTALS, _MARKS]
