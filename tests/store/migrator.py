"""Processes that migrate stores, for test_migrations.py. They are forks: all of them begin with everything imported.

`migrator.py URL OTHER-URL FOLDER`, both empty. The first gets the newest schema, then a row, then the later schema of
FOLDER, by processes that `kill -9` themselves before another statement each, or before the commit, until one gets
through; the other gets all at once from several processes.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import alembic.command  # noqa: F401  so that no fork has to import it
from sqlalchemy import event, inspect, text
from sqlalchemy.engine import Engine

from llmops.store.database import connect
from llmops.store.migrate import FOLDER, migrate
from llmops.store.store_url import StoreUrl
from llmops.store.tables import SCHEMA

# The revision after the newest.
LATER = f"{int(SCHEMA) + 1:04}"


async def migrated(url: str, folder: Path, newest: str) -> None:
    place = StoreUrl.parse(url)
    place.create()
    async with connect(place) as store:
        await migrate(store, folder, newest)


async def seen(url: str) -> dict[str, list[str]]:
    """The columns of every table, as another process sees them."""

    def columns(connection: Any) -> dict[str, list[str]]:
        found = inspect(connection)
        return {name: [one["name"] for one in found.get_columns(name)] for name in sorted(found.get_table_names())}

    async with connect(StoreUrl.parse(url)) as store, store.read() as connection:
        return await connection.run_sync(columns)


async def changed(url: str, statement: str) -> None:
    async with connect(StoreUrl.parse(url)) as store, store.write() as connection:
        await connection.execute(text(statement))


def die_before(last: int) -> None:
    """Statement number `last` that changes something, counted from 0, is not sent; a commit counts as one."""
    sent = 0

    def count(statement: str = "COMMIT") -> None:
        nonlocal sent
        if statement.split()[0] in ("CREATE", "ALTER", "DROP", "INSERT", "UPDATE", "COMMIT"):
            if sent == last:
                os.kill(os.getpid(), signal.SIGKILL)
            sent += 1

    event.listen(Engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: count(statement))
    event.listen(Engine, "commit", lambda _: count())


def child(url: str, folder: Path, newest: str, last: int | None = None) -> int:
    pid = os.fork()
    if pid:
        return pid
    if last is not None:
        die_before(last)
    asyncio.run(migrated(url, folder, newest))
    os._exit(0)


def race(url: str, folder: Path, newest: str, processes: int) -> list[int]:
    """Their exit statuses."""
    return [os.waitpid(pid, 0)[1] for pid in [child(url, folder, newest) for _ in range(processes)]]


def kill(url: str, folder: Path, newest: str, step: int) -> list[dict[str, list[str]]]:
    """Return the state of the store after each process; the last one was not killed."""
    states = []
    for last in itertools.count(0, step):
        _, status = os.waitpid(child(url, folder, newest, last), 0)
        states.append(asyncio.run(seen(url)))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    return states


def main(url: str, other: str, folder: Path) -> None:
    first = kill(url, FOLDER, SCHEMA, 9)
    asyncio.run(changed(url, "INSERT INTO tenants (id) VALUES ('acme')"))
    print(json.dumps({"first": first, "upgrade": kill(url, folder, LATER, 2), "race": race(other, folder, LATER, 4)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
