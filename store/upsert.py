"""INSERT … ON CONFLICT, which SQLite and PostgreSQL share and SQL does not."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection


def insert(connection: AsyncConnection | Connection, table: Table) -> Any:
    """The dialect's own insert, with `on_conflict_do_nothing` and `on_conflict_do_update`."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)
