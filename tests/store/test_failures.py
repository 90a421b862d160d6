"""Stores that are wrong, away, locked, damaged or full: one sentence each, and never the password."""

import asyncio
import contextlib
import re
import shutil
import socket
import sqlite3
import threading
from contextlib import closing

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from llmops.errors import InputError, LlmopsError, ResourceError
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant, list_tenants
from llmops.store.database import connect
from llmops.store.factory import open_store
from llmops.store.store_url import StoreUrl


async def refused(url: str) -> LlmopsError:
    with pytest.raises(LlmopsError) as error:
        await open_store(url)
    return error.value


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "The store is not a URL; write sqlite:///FILE or postgresql://"),
        ("mysql://root:hunter2@host/db", "The store cannot be mysql; write"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite://etc/store.db", "names no file; write .*four slashes"),
        ("postgresql://user:hunter2@host:port/db", "The store is not a URL"),
        ("postgresql://user:pass@hunter2@host/db", "write @ and / in the user and the password as %40"),
        ("postgresql://user:pass@a/hunter2@host/db", "more than one @"),
        ("postgresql://user:pass@a?hunter2=x@host/db", "more than one @"),
        ("sqlite:///store.db?mode=ro", r"unknown options \(mode\); known are none"),
        ("postgresql://h/d?password=hunter2", r"unknown options \(password\); known are ssl and prepared_"),
        ("postgresql://h/d?sslmode=hunter2", "an unknown sslmode; use one of disable, allow"),
        ("postgresql://h/d?prepared_statement_cache_size=hunter2", "that is not a number"),
        ("sqlite:////nowhere/at/all/store.db", "the folder /nowhere/at/all does not exist; create it first"),
    ],
)
async def test_urls_that_are_none(url, said):
    error = await refused(url)
    assert isinstance(error, InputError)
    assert re.search(said, error.message)
    assert "hunter2" not in error.message


async def test_a_wrong_password(postgres):
    before, _, after = postgres.partition("not-a-secret")
    error = await refused(f"{before}hunter2{after}")
    assert isinstance(error, InputError)
    assert error.message.endswith("refuses this user or password; correct them in the store's URL.")
    assert "hunter2" not in error.message
    assert "not-a-secret" not in error.message


async def test_a_server_that_is_away():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        error = await refused(f"postgresql://llmops:hunter2@127.0.0.1:{port}/llmops")
    assert isinstance(error, ResourceError)
    why = "cannot be reached; start PostgreSQL there, or correct host and port in the store's URL."
    assert error.message == f"The store postgresql://llmops:***@127.0.0.1:{port}/llmops {why}"


async def test_a_server_without_tls(postgres):
    error = await refused(f"{postgres}?sslmode=require")
    assert isinstance(error, InputError)
    assert error.message.endswith("does not support TLS, which sslmode requires; change sslmode in the store's URL.")


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_a_server_that_goes_away_in_between(store, databases):
    """Its backends are ended, and gone, as by a restart: that transaction fails, the next one has a new connection."""
    name = store.location.url.database
    others = f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{name}'"

    async def list_after(statement: str) -> None:
        async with store.read() as connection:
            await databases.run(statement)
            assert await list_tenants(connection) == []

    await list_after("SELECT 1")
    await databases.run(others)
    await list_after("SELECT 1")
    with pytest.raises(ResourceError, match=r"is busy, starting or stopping|cannot be reached"):
        await list_after(others)
    await list_after("SELECT 1")


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_a_task_that_is_cancelled_while_the_server_is_away_ends(store, databases):
    """Before the fix, the error of its rollback took the cancellation's place, and control's ledger went on."""
    begun, closed = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        with contextlib.suppress(LlmopsError, SQLAlchemyError):
            async with store.write() as connection:
                driver = (await connection.get_raw_connection()).driver_connection
                driver.add_termination_listener(lambda _: closed.set())
                await connection.execute(text("SELECT 1"))
                begun.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await begun.wait()
    name = store.location.url.database
    await databases.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    await closed.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_database_that_there_is_not(databases):
    error = await refused(databases.url("llmops_nowhere"))
    assert error.message.endswith("has no such database; `createdb` it first.")


async def test_a_file_that_is_no_database(folder):
    file = folder / "notes.txt"
    file.write_text("not a database, but long enough to be taken for a header of one " * 20)
    error = await refused(f"sqlite:///{file}")
    assert error.message == f"The store {file} is not a SQLite database; name another file."
    assert file.read_text().startswith("not a database")


async def test_a_damaged_file(newest_file, folder):
    file = folder / "store.db"
    content = bytearray(newest_file.read_bytes())
    content[4096 : 4096 * 6] = bytes(4096 * 5)
    file.write_bytes(content)
    with pytest.raises(ResourceError, match="is damaged; restore it"):
        async with await open_store(f"sqlite:///{file}") as store, store.read() as connection:
            await list_tenants(connection)


async def test_a_file_that_another_process_holds(newest_file, folder, by):
    file = shutil.copy(newest_file, folder / "store.db")
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    async with connect(StoreUrl.parse(f"sqlite:///{file}"), busy_seconds=0.05) as store:
        with pytest.raises(ResourceError, match="is held by another process"):
            async with store.write() as connection:
                await create_tenant(connection, "acme", Limits(), by)
        # those who read do not wait
        async with store.read() as connection:
            assert await list_tenants(connection) == []
        holder.execute("ROLLBACK")
        async with store.write() as connection:
            await create_tenant(connection, "acme", Limits(), by)
    holder.close()


async def test_a_new_file_that_another_process_sets_up_at_the_same_time(folder):
    """SQLite refuses the switch to a write-ahead log at once while another process writes a file without one."""
    path = folder / "new.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.3, other.execute, ["ROLLBACK"]).start()
        async with await open_store(f"sqlite:///{path}") as store, store.read() as connection:
            assert await connection.scalar(text("PRAGMA journal_mode")) == "wal"


async def test_a_full_database_keeps_what_it_had(newest_file, folder, by):
    """SQLite's own bound on pages gives what a full disk gives: SQLITE_FULL."""
    file = shutil.copy(newest_file, folder / "store.db")

    async def fill(store, names):
        async with store.write() as connection:
            await connection.exec_driver_sql("PRAGMA max_page_count = 1")
            for name in names:
                await create_tenant(connection, name, Limits(), by)

    async with connect(StoreUrl.parse(f"sqlite:///{file}"), pool_size=1) as store:
        await fill(store, ["acme"])
        with pytest.raises(ResourceError, match=r"the disk is full. The last change is undone"):
            await fill(store, (f"tenant-{number}" for number in range(10_000)))
        async with store.read() as connection:
            assert [tenant.id for tenant in await list_tenants(connection)] == ["acme"]


async def test_a_process_that_can_start_no_thread(folder, monkeypatch):
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("aiosqlite.core.Thread", Refused)
    said = (await refused(f"sqlite:///{folder}/store.db")).message
    assert said.endswith("cannot be used: this process cannot start a thread; raise its limit of memory or threads.")


async def test_a_file_is_its_owners_alone(folder):
    await (await open_store(f"sqlite:///{folder}/new.db")).close()
    assert (folder / "new.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("given", ["sslmode=require", "ssl=require"])
def test_the_word_that_providers_use_for_tls(given):
    assert StoreUrl.parse(f"postgres://u:p@h/d?{given}").url.query == {"ssl": "require"}
