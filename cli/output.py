"""Terminal output that several commands share: consoles, tables, fields, and JSON for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from llmops.units import format_usd
from llmops.untrusted_text import escape_unsafe, json_escape_unsafe

SchemaT = TypeVar("SchemaT", bound="AdminSchema")

#: Maximum number of characters that `print_line` shows. The settings of a key take some hundreds.
MAX_LINE_LENGTH = 4096

if TYPE_CHECKING:
    from rich.console import Console

    from llmops.control.admin.schemas import AdminSchema, KeyRead, LimitFields, TenantRead

    Limited = KeyRead | TenantRead | LimitFields


def console(*, stderr: bool = False, **more: Any) -> Console:
    """Return a console of the terminal that interprets no text as markup.

    Untrusted names may look like markup. With NO_COLOR the console has no colours and no other
    styling.
    """
    from rich.console import Console

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, color_system=colours, markup=False, **more)


def table_console(piped: int) -> Console:
    """Return a console on standard output.

    In a pipe, the console is `piped` characters wide, because a truncated line would go unnoticed.
    """
    has_none = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return console(highlight=False, width=piped if has_none else None)


#: Width in characters of a table in a pipe. So wide that no name is truncated, because a program
#: that reads the pipe needs whole names.
PIPED_WIDTH = 400

#: Width of a terminal, in characters, from which on tables have all of their columns.
MIN_WIDE_WIDTH = 150

#: Number of spaces between two columns.
GAP = 2


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), narrow: int | None = None
) -> None:
    """Print a table.

    Args:
        columns: The names of the columns.
        rows: The cells of each row.
        right: The names of columns that are aligned to the right, such as numbers.
        narrow: The number of columns that are shown in a narrow terminal, or None for all columns.
    """
    from rich.cells import cell_len
    from rich.table import Table

    console = table_console(PIPED_WIDTH)
    columns = [escape_unsafe(name) for name in columns]
    rows = [[escape_unsafe(cell) for cell in row] for row in rows]
    kept = columns if console.width >= MIN_WIDE_WIDTH else columns[:narrow]
    rows = [row[: len(kept)] for row in rows]
    widths = [max(map(cell_len, cells)) for cells in zip(kept, *rows, strict=True)]
    if sum(widths) + GAP * (len(kept) - 1) <= console.width:
        _show_plain(kept, rows, right, widths)
        return
    # fold cells only if the table is too wide, because folding takes a millisecond per row
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in kept:
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=name == columns[0])
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _show_plain(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str], widths: Sequence[int]
) -> None:
    from rich.cells import cell_len

    def aligned(cells: Sequence[str]) -> str:
        padded = []
        for name, cell, width in zip(columns, cells, widths, strict=True):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if name in right else cell + space)
        return (" " * GAP).join(padded).rstrip()

    click.secho(aligned(columns), bold=True)
    for row in rows:
        click.echo(aligned(row))


def print_fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Print the fields of one object, one field per line."""
    for name, value in pairs:
        click.echo(f"{name:12}{escape_unsafe(value)}")


def print_line(text: str, *, err: bool = False) -> None:
    """Print a line that may hold a server's text, with unsafe characters escaped."""
    click.echo(escape_unsafe(text, MAX_LINE_LENGTH), err=err)


def print_json(data: Any) -> None:
    """Print data as JSON that is safe to show in a terminal."""
    click.echo(json_escape_unsafe(data))


def print_result(result: AdminSchema, as_json: bool, text: str) -> None:
    """Print a result of the admin API as JSON, or as a line of text."""
    if as_json:
        print_json(result.data())
    else:
        print_line(text)


def print_results(
    results: Sequence[SchemaT],
    as_json: bool,
    empty: str,
    columns: Sequence[str],
    row: Callable[[SchemaT], Sequence[str]],
    right: Sequence[str] = (),
    narrow: int | None = None,
) -> None:
    """Print results of the admin API as JSON or as a table.

    Without results, the sentence `empty` is printed instead of a table. `row` returns the cells of
    a result. `print_table` explains the other arguments.
    """
    if as_json:
        print_json([one.data() for one in results])
    elif not results:
        click.echo(empty, err=True)
    else:
        print_table(columns, map(row, results), right, narrow)


def format_timestamp(time: datetime | None) -> str:
    """Return a time without seconds, or `never`."""
    return f"{time:%Y-%m-%d %H:%M}" if time else "never"


def format_limits(limits: Limited, short: bool = False) -> str:
    """Return limits as `60 requests/min, 90,000 tokens/min, 4 at once`.

    With `short`, for a table, the text is `60 rpm, 90,000 tpm`.
    """
    units = ("rpm", "tpm") if short else ("requests/min", "tokens/min")
    values = zip((limits.rpm, limits.tpm, limits.concurrent), (*units, "at once"), strict=True)
    return ", ".join(f"{value:,} {unit}" for value, unit in values if value is not None) or "no limit"


def format_budget(limits: Limited) -> str:
    """Return a budget as `$50.00/month`."""
    return f"{format_usd(limits.budget.micros or 0)}/{limits.budget.period}" if limits.budget else "no budget"
