"""Times in the store: UTC, to the microsecond."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, DateTime, Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware datetime. SQLite keeps none, and would keep local digits as they are: there it is UTC's digits.

    Raises ValueError for a datetime without a time zone.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def sqlite_timestamp(moment: datetime) -> str:
    """What SQLite keeps of it, for rows that go to the driver as they are."""
    return f"{_second(moment.timestamp() // 1)}.{moment.microsecond:06d}"


@lru_cache(maxsize=1024)
def _second(unix: float) -> str:
    """Of what comes at one time there are many."""
    return datetime.fromtimestamp(unix, UTC).isoformat(" ")[:-6]


def insert(connection: AsyncConnection | Connection, table: Table) -> Any:
    """The dialect's own insert, with `on_conflict_do_nothing` and `on_conflict_do_update`."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def canonical_uuid(text: str) -> str:
    """Lower-case, with four dashes. Raises ValueError for what is no UUID."""
    return text if _CANONICAL.fullmatch(text) else str(UUID(text))
