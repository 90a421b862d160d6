"""Tests of migrations of a store to its schema, on both databases.

A migration runs by itself, once, whole or not at all.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from llmops.errors import InputError, VersionMismatchError
from llmops.store.database import connect
from llmops.store.factory import open_store
from llmops.store.migrate import FOLDER
from llmops.store.store_url import StoreUrl
from llmops.store.tables import SCHEMA, SCHEMA_TABLE, metadata

LATER = f"{int(SCHEMA) + 1:04}"
NEXT = '''
"""A later schema: a column with a value for each row, a table, an index less."""
import sqlalchemy as sa
from alembic import op

revision = "LATER"
down_revision = "SCHEMA"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("region", sa.String(20)))
    op.execute("UPDATE tenants SET region = 'eu'")
    op.create_table("later", sa.Column("id", sa.Integer, primary_key=True))
    op.execute("INSERT INTO later (id) VALUES (1)")
    op.drop_index("idx_usage_totals_day", "usage_totals")
'''


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The migrations, and one more."""
    copied = tmp_path / "migrations"
    shutil.copytree(FOLDER, copied)
    (copied / "versions" / "later.py").write_text(NEXT.replace("LATER", LATER).replace("SCHEMA", SCHEMA))
    return copied


async def test_the_migrations_make_the_tables_that_the_queries_are_written_for(empty_url):
    async with await open_store(empty_url) as store, store.read() as connection:

        def differences(sync):
            # the table in which alembic keeps the version is left out of the comparison
            others = {"include_name": lambda name, kind, _: (kind, name) != ("table", SCHEMA_TABLE)}
            return compare_metadata(MigrationContext.configure(sync, opts={"compare_type": True, **others}), metadata)

        assert await connection.run_sync(differences) == []
        assert await connection.scalar(text(f"SELECT version_num FROM {SCHEMA_TABLE}")) == SCHEMA


def test_migrations_that_are_killed_and_those_that_come_together(empty_url, another_url, later):
    command = [sys.executable, str(Path(__file__).with_name("migrator.py")), empty_url, another_url, str(later)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    # a first migration that was killed has left nothing, and the next one finished
    *killed, made = states["first"]
    assert len(killed) >= 3
    assert all(state == {} for state in killed)
    assert set(made) == {*metadata.tables, SCHEMA_TABLE}
    # an upgrade that was killed has left the old schema: before the column, the table, the index and the commit
    *killed, upgraded = states["upgrade"]
    assert len(killed) == 4
    assert all(state == made for state in killed)
    assert upgraded["later"] == ["id"]
    assert asyncio.run(rows(empty_url, "SELECT id, region FROM tenants")) == [("acme", "eu")]
    # of several processes one migrated, once, and all went on
    assert states["race"] == [0] * 4
    assert asyncio.run(rows(another_url, "SELECT id FROM later")) == [(1,)]
    with pytest.raises(VersionMismatchError, match=rf"has schema {LATER}, which a newer llmops made .*up to {SCHEMA}"):
        asyncio.run(open_store(empty_url))


async def rows(url: str, query: str) -> list[tuple]:
    async with connect(StoreUrl.parse(url)) as store, store.read() as connection:
        return [tuple(row) for row in await connection.execute(text(query))]


async def test_a_store_from_before_the_first_release_is_refused(empty_url):
    async with connect(StoreUrl.parse(empty_url)) as store, store.write() as connection:
        await connection.execute(text(f"CREATE TABLE {SCHEMA_TABLE} (version_num VARCHAR(32))"))
        await connection.execute(text(f"INSERT INTO {SCHEMA_TABLE} VALUES ('0002')"))
    with pytest.raises(VersionMismatchError, match="has schema 0002, made before the first release"):
        await open_store(empty_url)


async def test_a_database_with_a_users_table_of_another_program_is_left_alone(empty_url):
    async with connect(StoreUrl.parse(empty_url)) as store, store.write() as connection:
        await connection.execute(text("CREATE TABLE users (id INTEGER, password TEXT)"))
    with pytest.raises(InputError, match=r"tables of another program \(users\); give llmops a database of its own"):
        await open_store(empty_url)
    async with connect(StoreUrl.parse(empty_url)) as store, store.read() as connection:
        assert await connection.run_sync(lambda sync: inspect(sync).get_table_names()) == ["users"]


async def test_a_sqlite_file_of_another_program_is_not_taken_for_an_empty_store(tmp_path):
    url = f"sqlite:///{tmp_path}/theirs.db"
    async with connect(StoreUrl.parse(url)) as store, store.write() as connection:
        await connection.execute(text("CREATE TABLE orders (id INTEGER)"))
    with pytest.raises(InputError, match=r"tables of another program \(orders\); give llmops a database of its own"):
        await open_store(url)
