"""How `key`, `tenant`, `price` and `usage` show what they found: tables for people, plain data for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from llmops.store.accounts.keys import KeyRow
    from llmops.store.accounts.limits import Limits
    from llmops.store.accounts.tenants import Tenant
    from llmops.store.prices import Price

# a pipe has no width, and a truncated name is useless
PIPED = 400
WIDE = 150


def show(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), narrow: int | None = None
) -> None:
    """A table; the columns of `right` are numbers, and a narrow terminal has only the first `narrow` columns."""
    from rich.console import Console
    from rich.table import Table

    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(highlight=False, markup=False, width=PIPED if piped else None)
    shown = columns if console.width >= WIDE else columns[:narrow]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in shown:
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=name == columns[0])
    for row in rows:
        table.add_row(*row[: len(shown)])
    console.print(table)


def show_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """One thing, line by line."""
    for name, value in pairs:
        click.echo(f"{name:12}{value}")


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def dollars(micros: int) -> str:
    """`$0.000019`, `$50.00`: exact, with at least two decimals."""
    whole, rest = divmod(micros, 1_000_000)
    return f"${whole:,}.{f'{rest:06}'.rstrip('0'):0<2}"


def when(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment else "never"


def limits_text(limits: Limits, short: bool = False) -> str:
    """`60 requests/min, 90,000 tokens/min, 4 at once`; short, for a table: `60 rpm, 90,000 tpm, 4 at once`."""
    units = ("rpm", "tpm") if short else ("requests/min", "tokens/min")
    named = zip((limits.rpm, limits.tpm, limits.concurrent), (*units, "at once"), strict=True)
    return ", ".join(f"{value:,} {unit}" for value, unit in named if value is not None) or "no limit"


def budget_text(limits: Limits) -> str:
    return f"{dollars(limits.budget.micros)}/{limits.budget.period}" if limits.budget else "no budget"


def limits_data(limits: Limits) -> dict[str, Any]:
    """In the terms of the options."""
    budget = limits.budget and {"usd": limits.budget.micros / 1e6} | vars(limits.budget)
    return {"rpm": limits.rpm, "tpm": limits.tpm, "concurrent": limits.concurrent, "budget": budget}


def key_data(key: KeyRow, now: datetime) -> dict[str, Any]:
    spec = key.spec
    return {
        "id": key.id,
        "begins": key.prefix,
        "name": spec.name,
        "tenant": key.tenant_id,
        "user": key.email,
        "tier": spec.tier,
        "scopes": list(spec.scopes),
        "models": None if spec.models is None else list(spec.models),
        **limits_data(spec.limits),
        "created_at": _iso(key.created_at),
        "expires_at": _iso(spec.expires_at),
        "revoked_at": _iso(key.revoked_at),
        "state": key.state(now),
    }


def tenant_data(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        **limits_data(tenant.limits),
        "created_at": _iso(tenant.created_at),
        "deleted_at": _iso(tenant.deleted_at),
    }


def price_data(price: Price) -> dict[str, Any]:
    """In US dollars per million tokens."""
    return {
        "id": price.id,
        "model": price.model,
        "from": _iso(price.valid_from),
        "input": price.input_micros / 1e6,
        "cached": price.cached_micros / 1e6,
        "output": price.output_micros / 1e6,
    }


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None
