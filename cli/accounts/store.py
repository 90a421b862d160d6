"""The store that `key`, `tenant`, `price` and `usage` work on."""

from __future__ import annotations

import asyncio
import getpass
import importlib.util
import os
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TypeVar

from llmops.errors import MissingDependencyError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from llmops.store.audit import By

Found = TypeVar("Found")
_EXTRA = ("sqlalchemy", "alembic", "aiosqlite", "asyncpg")


def reading(url: str | None, work: Callable[[AsyncConnection], Awaitable[Found]]) -> Found:
    """What `work` finds in the store."""
    return asyncio.run(_run(url, work, writes=False))


def writing(url: str | None, work: Callable[[AsyncConnection], Awaitable[Found]]) -> Found:
    """As `reading`, in one transaction."""
    return asyncio.run(_run(url, work, writes=True))


async def _run(url: str | None, work: Callable[[AsyncConnection], Awaitable[Found]], writes: bool) -> Found:
    require_store_extra()
    from llmops.store.open import open_store

    async with (
        await open_store(url or default_store(), pool_size=1) as store,
        store.write() if writes else store.read() as connection,
    ):
        return await work(connection)


def default_store() -> str:
    from llmops.cache import cache_dir

    return f"sqlite:///{cache_dir() / 'store.db'}"


def require_store_extra() -> None:
    """Raises MissingDependencyError where what is above the base install is not installed."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"A store needs {', '.join(missing)}: pip install 'llmops[store]'.")


def myself() -> By:
    """Who the audit log is told that it was, and now."""
    require_store_extra()
    from llmops.store.audit import By

    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # a container's user without a name
        name = str(os.getuid())
    return By(f"cli:{name}", datetime.now(timezone.utc))
