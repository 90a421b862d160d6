"""Lists of rows of which some have values that llmops never writes."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import JSON, ColumnElement, RowMapping, Select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.background import LogOnce
from llmops.errors import InputError
from llmops.store.columns import DAMAGED
from llmops.untrusted_text import escape_unsafe

log = logging.getLogger(__name__)

_damaged = LogOnce()

ResultT = TypeVar("ResultT")
#: Number of rows after which other tasks run, because a row can have a hundred kilobytes of JSON.
_ROWS_PER_TURN = 50
_JSON_TYPES = dict | list | str | int | float


@contextmanager
def name_damaged(what: str, name: str) -> Iterator[None]:
    """Raise InputError, which names the row that is read, for a damaged value."""
    try:
        yield
    except DAMAGED as error:
        raise InputError(
            f"The {what} {name} has a damaged value ({type(error).__name__}); correct the row in the store."
        ) from error


async def read_undamaged(
    connection: AsyncConnection,
    statement: Select[Any],
    make: Callable[[RowMapping], ResultT],
    what: str,
    name: ColumnElement[Any],
    limit: int | None = None,
) -> Sequence[ResultT]:
    """Return what `make` returns for each row. Rows with a damaged value are left out and logged.

    Args:
        connection: A connection to the store.
        statement: The query, in a fixed order and without a limit.
        make: Returns the result for a row.
        what: Kind of the rows, for the log.
        name: The column that names a row in the log.
        limit: Maximum number of results, or None for all.
    """
    # SQLite stores values of any type, and what a driver cannot decode are bytes
    types = {
        one.name: _JSON_TYPES if isinstance(one.type, JSON) else one.type.python_type
        for one in statement.selected_columns
    }
    found: list[ResultT] = []
    passed = 0
    while True:
        page = statement.limit(limit and limit - len(found)).offset(passed)
        rows = (await connection.execute(page)).mappings()
        first, damaged = passed, {}
        while True:
            try:
                if (row := rows.fetchone()) is None:
                    break
                wrong = [one for one, kind in types.items() if not isinstance(row[one], kind | None)]
                if wrong:
                    raise TypeError(wrong)
                found.append(make(row))
            except DAMAGED as error:
                damaged[passed - first] = type(error).__name__
            passed += 1
            if not passed % _ROWS_PER_TURN:
                await asyncio.sleep(0)
        if not damaged:
            return found
        names = (await connection.execute(page.with_only_columns(name))).scalars().all()
        for at, problem in damaged.items():
            if _damaged.is_new((what, names[at]), problem):
                log.error(
                    "The %s %s has a damaged value (%s) and is left out; correct the row in the store.",
                    *(what, escape_unsafe(str(names[at])), problem),
                )
        if limit is None:
            return found
