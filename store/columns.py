"""Column types, identifiers and inserts that behave alike in SQLite and PostgreSQL."""

import re
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    LargeBinary,
    String,
    Table,
    Text,
    cast,
    func,
    literal,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeDecorator

from llmops.clocks import utc_now
from llmops.errors import InputError
from llmops.input_files import MALFORMED

#: Exceptions raised for rows whose values were changed by another program or a damaged disk.
DAMAGED = (InputError, *MALFORMED)


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware datetime, stored as UTC text in SQLite, which has no time zones.

    Raises:
        ValueError: A datetime has no time zone.
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


def database_time(connection: AsyncConnection, at: datetime) -> ColumnElement[datetime]:
    """Return the time that PostgreSQL's clock shows when this machine's clock shows `at`.

    A machine whose clock is ahead then deletes nothing too early. SQLite has the machine's clock.
    """
    if connection.dialect.name == "sqlite":
        return literal(at, UtcDateTime)
    kind = DateTime(timezone=True)
    return literal(at, kind) + (func.statement_timestamp(type_=kind) - literal(utc_now(), kind))


def byte_length(connection: AsyncConnection, column: ColumnElement[Any]) -> ColumnElement[int]:
    """Return the SQL expression for the length of a text in bytes of UTF-8."""
    if connection.dialect.name == "sqlite":
        return func.length(cast(column, LargeBinary))
    return func.octet_length(column)


class ClientText(TypeDecorator[str]):
    """Text from a client or a model. U+0000, which PostgreSQL cannot store, becomes U+FFFD."""

    impl: type[String] = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value and value.replace("\0", "\ufffd")


class ClientString(ClientText):
    """Text with a maximum length. U+0000 becomes U+FFFD."""

    impl = String
    cache_ok = True


def insert(connection: AsyncConnection | Connection, table: Table) -> Any:
    """Return an insert for the connection's dialect, with the methods for conflicts.

    The methods are `on_conflict_do_nothing` and `on_conflict_do_update`.
    """
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def canonical_uuid(text: str) -> str:
    """Return a UUID in lower case with four dashes. Raises ValueError if the text is not a UUID."""
    return text if _CANONICAL.fullmatch(text) else str(UUID(text))
