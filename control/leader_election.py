"""Leader election between control processes that share a store.

Leadership may overlap for seconds when it changes, so every leader job must be idempotent.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from llmops.background import LogOnce, cancel_tasks
from llmops.clocks import wait_with_timeout
from llmops.errors import LlmopsError, ResourceError
from llmops.store.database import connect
from llmops.store.store_url import StoreUrl

log = logging.getLogger(__name__)

#: Seconds between two attempts to take the lock, and between two checks that the lock is still
#: held. A free lock is taken after this time at the latest.
RETRY_INTERVAL = 2.0

#: Seconds without an answer of the store after which this process gives up the leadership, because
#: the store may have released the lock.
WATCH_TIMEOUT = 10.0

#: Seconds without a check of the leader after which PostgreSQL releases the leader's lock: a paused
#: process, or a machine that is gone, keeps its connection for hours.
STILL_TIMEOUT = 30.0

#: Number of the advisory lock in PostgreSQL. The value is arbitrary, but differs from the lock of
#: the migrations.
ADVISORY_LOCK_ID = 0x6C6C6D6F7074

#: A coroutine function that raises an exception if the lock was lost.
LockWatch = Callable[[], Awaitable[object]]


async def run_while_leading(
    store: StoreUrl, work: Callable[[], Awaitable[None]], changed: Callable[[bool], None]
) -> None:
    """Run `work` whenever this process is the leader, until cancelled.

    Args:
        store: The store whose control processes elect a leader.
        work: The leader's work. Cancelled when this process loses the leadership.
        changed: Called with True when this process becomes the leader, and with False when it loses
            the leadership.
    """
    problems = LogOnce()
    while True:
        try:
            async with _try_lock(store) as watch:
                if watch is not None:
                    changed(True)
                    problems.is_new("leading", None)
                    await _run_until_first_ends(work, watch)
        except (LlmopsError, SQLAlchemyError) as error:
            reason = (
                error.message
                if isinstance(error, LlmopsError)
                else f"The store failed ({type(error).__name__}); see the log of the database server."
            )
            if problems.is_new("leading", reason):
                log.error("This process cannot become the leader and tries again. %s", reason)
        finally:
            changed(False)
        await asyncio.sleep(RETRY_INTERVAL)


def _try_lock(store: StoreUrl) -> AbstractAsyncContextManager[LockWatch | None]:
    """Try to take the lock.

    Yields:
        A coroutine function that raises an exception if the lock was lost, or None if another
            process holds the lock.
    """
    return _postgres_lock(store) if store.file is None else _file_lock(store.file)


@asynccontextmanager
async def _file_lock(store: Path) -> AsyncIterator[LockWatch | None]:
    """Lock a file beside the SQLite file, and yield the watch of the lock.

    Yield None if another process holds the lock. The operating system releases the lock when the
    process ends.
    """
    lock = FileLock(store.with_name(f"{store.name}.lead"), mode=0o600, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield None
        return
    except OSError as error:
        raise ResourceError(
            f"{lock.lock_file} cannot be written ({error.strerror}); let this user write to it and its folder."
        ) from error
    try:
        yield asyncio.Event().wait
    finally:
        lock.release()


@asynccontextmanager
async def _postgres_lock(store: StoreUrl) -> AsyncIterator[LockWatch | None]:
    """Take an advisory lock in one long transaction, which PgBouncer keeps on one connection.

    Yield the watch of the lock, or None if another process holds the lock. Between its statements,
    the transaction has no snapshot, so it does not hold up vacuum. Waiting for the lock inside
    PostgreSQL would be one long statement with a snapshot.
    """
    async with connect(store, pool_size=1) as database, database.write() as connection:
        if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK_ID}):
            yield None
            return
        limit = round(STILL_TIMEOUT * 1000)
        await connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {limit}"))

        async def watch() -> None:
            while True:
                await asyncio.sleep(RETRY_INTERVAL)
                try:
                    await wait_with_timeout(WATCH_TIMEOUT, connection.execute(text("SELECT 1")))
                except TimeoutError as error:
                    raise ResourceError(
                        "The store does not answer; this process gives up the leadership until the store answers."
                    ) from error

        yield watch


async def _run_until_first_ends(work: Callable[[], Awaitable[None]], watch: LockWatch) -> None:
    """Run both coroutines until one of them ends, then cancel the other."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(function()) for function in (work, watch)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_tasks(*tasks)
    for task in done:
        task.result()
