"""Which of several control processes leads: one at a time, and another when that one is gone, however it went.

What the leader does may overlap for seconds with what the one before still does: all of it can be done twice.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from llmops.clocks import wait_with_timeout
from llmops.control.leader_jobs import cancel_tasks
from llmops.errors import LlmopsError, ResourceError
from llmops.store.database import connect
from llmops.store.store_url import StoreUrl

log = logging.getLogger(__name__)

# seconds between two attempts, and between two looks whether the lock is still held
RETRY_INTERVAL = 2.0
# seconds after which a store that says nothing may have given the lock to another
WATCH_TIMEOUT = 10.0
# any number that the migrations do not use
ADVISORY_LOCK_ID = 0x6C6C6D6F7074

LockWatch = Callable[[], Awaitable[object]]


async def run_while_leading(
    place: StoreUrl, work: Callable[[], Awaitable[None]], changed: Callable[[bool], None]
) -> None:
    """Do `work` while this process leads; until it is cancelled. `changed` hears whether it leads."""
    told = ""
    while True:
        try:
            async with _try_lock(place) as watch:
                if watch is not None:
                    changed(True)
                    told = ""
                    await _run_until_first_ends(work, watch)
        except (LlmopsError, SQLAlchemyError) as error:
            # once, not every two seconds
            said = error.message if isinstance(error, LlmopsError) else f"The store failed ({type(error).__name__})."
            if said != told:
                log.error("this process cannot lead. %s", said)
            told = said
        finally:
            changed(False)
        await asyncio.sleep(RETRY_INTERVAL)


def _try_lock(place: StoreUrl) -> AbstractAsyncContextManager[LockWatch | None]:
    """What raises once the lock is lost; None where another process has it."""
    return _postgres_lock(place) if place.file is None else _file_lock(place.file)


@asynccontextmanager
async def _file_lock(store: Path) -> AsyncIterator[LockWatch | None]:
    """Beside the SQLite file; the system gives it back when the process ends."""
    path = store.with_name(f"{store.name}.lead")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written ({error.strerror}).") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield asyncio.Event().wait
    finally:
        os.close(file)


@asynccontextmanager
async def _postgres_lock(place: StoreUrl) -> AsyncIterator[LockWatch | None]:
    """An advisory lock of one long transaction, which also a PgBouncer keeps on one connection. Between statements it
    has no snapshot, so nothing waits for it; to wait inside PostgreSQL for the lock would be a statement, with one."""
    async with connect(place, pool_size=1) as store, store.write() as connection:
        if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK_ID}):
            yield None
            return

        async def watch() -> None:
            while True:
                await asyncio.sleep(RETRY_INTERVAL)
                try:
                    await wait_with_timeout(WATCH_TIMEOUT, connection.execute(text("SELECT 1")))
                except TimeoutError as error:
                    raise ResourceError("The store does not answer; the lead is given up.") from error

        yield watch


async def _run_until_first_ends(work: Callable[[], Awaitable[None]], watch: LockWatch) -> None:
    """Until one of them ends; the other is cancelled then."""
    tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(_run(one)) for one in (work, watch)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_tasks(tasks)
    for task in done:
        task.result()


async def _run(one: Callable[[], Awaitable[object]]) -> None:
    await one()
