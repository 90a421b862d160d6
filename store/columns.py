"""Column types, identifiers and inserts that behave alike in SQLite and PostgreSQL."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    LargeBinary,
    String,
    Table,
    Text,
    case,
    cast,
    func,
    literal,
    select,
    type_coerce,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from llmops.clocks import utc_now
from llmops.errors import InputError
from llmops.input_files import MALFORMED

#: Exceptions raised for rows whose values were changed by another program or a damaged disk.
DAMAGED = (InputError, *MALFORMED)


#: Largest difference of two clocks that is not corrected.
CLOCK_TOLERANCE = timedelta(seconds=2)


#: Maximum of a sum in a row of the totals. A thousand such rows add up to less than 2**63, above
#: which a database's sum would fail or become a float.
MAX_SUM = 2**53 - 1


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

    Times that several machines compare are kept in it, because the clock of one may be days ahead
    or back. SQLite has the machine's clock.
    """
    if connection.dialect.name == "sqlite":
        return literal(at, UtcDateTime)
    return literal(at, DateTime(timezone=True)) + _clock_difference()


def machine_time(connection: AsyncConnection, column: Column[datetime]) -> ColumnElement[datetime]:
    """Return the column, a `database_time`, as the time that this machine's clock showed."""
    if connection.dialect.name == "sqlite":
        return column
    return type_coerce(column - _clock_difference(), UtcDateTime).label(column.name)


def store_time(connection: Connection) -> datetime:
    """Return the time of PostgreSQL's clock, or of this machine's clock for SQLite."""
    if connection.dialect.name == "sqlite":
        return utc_now()
    return connection.scalar(select(func.statement_timestamp(type_=UtcDateTime))) or utc_now()


def _clock_difference() -> ColumnElement[timedelta]:
    """Return by how much PostgreSQL's clock is ahead of this machine's clock.

    Less than CLOCK_TOLERANCE is 0, because it may be the time that the statement takes to the
    server, and times of one machine keep their order.
    """
    kind = DateTime(timezone=True)
    ahead = func.statement_timestamp(type_=kind) - literal(utc_now(), kind)
    return case((ahead.between(-CLOCK_TOLERANCE, CLOCK_TOLERANCE), timedelta(0)), else_=ahead)


def byte_length(connection: AsyncConnection, column: ColumnElement[Any]) -> ColumnElement[int]:
    """Return the SQL expression for the length of a text in bytes of UTF-8."""
    if connection.dialect.name == "sqlite":
        return func.length(cast(column, LargeBinary))
    return func.octet_length(column)


def sum_of(column: ColumnElement[int], dialect: str) -> FunctionElement[int]:
    """Return the SQL expression for the sum of a column that is never negative.

    SQLite stores values of any type, and fails on sums above 2**63. Damaged values therefore count
    as 0 there.
    """
    if dialect == "sqlite":
        column = case((column.between(0, MAX_SUM), column), else_=0)
    return func.sum(column)


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
