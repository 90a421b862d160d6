"""`llmops usage`: what was used, and what it cost."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.options import store_options
from llmops.cli.accounts.store import reading
from llmops.cli.accounts.tables import dollars, print_json
from llmops.cli.accounts.tables import show as show_table
from llmops.cli.accounts.types import DayType
from llmops.errors import InputError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from llmops.store.usage import UsageFilter, UsageSum

GROUPS = ("day", "tenant", "user", "model", "key")
COUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens")


@click.command("usage")
@click.option("--tenant", help="Only this tenant's, even if deleted.")
@click.option("--user", metavar="EMAIL", help="Only this user's.")
@click.option("--key", help="Only this key's.")
@click.option("--model", help="Only this model's.")
@click.option("--from", "first", type=DayType(), help="First day (UTC).  [default: the first of this month]")
@click.option("--to", "last", type=DayType(), help="Last day (UTC), included.  [default: today]")
@click.option(
    "--by",
    "groups",
    type=click.Choice(GROUPS),
    multiple=True,
    help="One line for each; may be repeated.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print the result as CSV.")
@store_options
def command(
    first: date | None,
    last: date | None,
    groups: tuple[str, ...],
    store: str | None,
    as_json: bool,
    as_csv: bool,
    **only: str | None,
) -> None:
    """What was used, and what it cost: requests, tokens and US dollars.

    Without --by there is a line for each tenant and model. Input tokens include those that were found in the engine's
    cache, which have a price of their own.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other.")
    groups = tuple(dict.fromkeys(groups)) or ("tenant", "model")
    today = datetime.now(timezone.utc).date()
    last = last or max(today, first or today)
    first = first or last.replace(day=1)
    if first > last:
        raise InputError(f"--from {first} is after --to {last}.")

    async def work(connection: AsyncConnection) -> tuple[Sequence[UsageSum], UsageSum]:
        from llmops.store.usage import sum_usage

        wanted = await _filter(connection, first, last, only)
        return await sum_usage(connection, wanted, groups), (await sum_usage(connection, wanted))[0]

    sums, total = reading(store, work)
    if as_json:
        period = {"from": str(first), "to": str(last)}
        print_json({"period": period, **_counts(total), "lines": [_group(one) | _counts(one) for one in sums]})
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*groups, *_counts(total)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(_group(one) | _counts(one) for one in sums)
    else:
        _show(sums, total, groups, f"{first} to {last} (UTC)")


async def _filter(connection: AsyncConnection, first: date, last: date, only: dict[str, str | None]) -> UsageFilter:
    """Raises InputError for a tenant, user or key that was never there."""
    from llmops.store.accounts.keys import require_key
    from llmops.store.accounts.tenants import find_tenant, require_tenant
    from llmops.store.accounts.users import require_user
    from llmops.store.usage import UsageFilter

    tenant, user, key = only["tenant"], only["user"], only["key"]
    if tenant and await find_tenant(connection, tenant) is None:
        await require_tenant(connection, tenant)
    return UsageFilter(
        tenant_id=tenant,
        user_id=(await require_user(connection, user)).id if user else None,
        key_id=(await require_key(connection, key)).id if key else None,
        model=only["model"],
        first=first,
        last=last,
    )


def _group(one: UsageSum) -> dict[str, Any]:
    # usage of a user whom nobody knows is on the bill all the same
    return {name: "unknown" if value is None else str(value) for name, value in one.group.items()}


def _counts(one: UsageSum) -> dict[str, Any]:
    return {name: getattr(one, name) for name in COUNTS} | {
        "reasoning_tokens": one.reasoning_tokens,
        "cost_micros": one.cost_micros,
        "cost_usd": one.cost_micros / 1e6,
    }


def _show(sums: Sequence[UsageSum], total: UsageSum, groups: Sequence[str], period: str) -> None:
    if not sums:
        click.echo(f"Nothing was used, {period}.", err=True)
        return
    right = ("requests", "input", "cached", "output", "cost")
    rows = [[*_group(one).values(), *_cells(one)] for one in sums]
    rows.append(["total", *[""] * (len(groups) - 1), *_cells(total)])
    click.echo(f"{period}")
    show_table((*groups, *right), rows, right)


def _cells(one: UsageSum) -> list[str]:
    return [*(f"{getattr(one, name):,}" for name in COUNTS), dollars(one.cost_micros)]
