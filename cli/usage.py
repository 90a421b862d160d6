"""`llmops usage`: what was used, and what it cost."""

from __future__ import annotations

import asyncio
import csv
import sys
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.account_options import admin_options
from llmops.cli.accounts.admin_backend import AdminBackend, key_reference
from llmops.cli.accounts.output import format_timestamp, print_json
from llmops.cli.accounts.output import print_table as show_table
from llmops.cli.accounts.param_types import DayType, typed_values
from llmops.money import format_usd
from llmops.untrusted_text import escape_unsafe

if TYPE_CHECKING:
    from llmops.control.admin.schemas import Reconciliation, UsageLine, UsageReport, UsageTotals

GROUPS = ("day", "tenant", "user", "model", "key")
COUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
COUNTED = (*COUNTS, "reasoning_tokens", "cost_micros", "cost_usd")


@click.group("usage", invoke_without_command=True)
@click.option("--tenant", help="Only usage of this tenant, even if deleted.")
@click.option("--user", metavar="EMAIL", help="Only usage of this user.")
@click.option("--key", help="Only usage of this key.")
@click.option("--model", help="Only usage of this model.")
@click.option("--from", "first", type=DayType(), help="First day (UTC).  [default: the first of this month]")
@click.option("--to", "last", type=DayType(), help="Last day (UTC), included.  [default: today]")
@click.option(
    "--by",
    "groups",
    type=click.Choice(GROUPS),
    multiple=True,
    help="Group by this; may be repeated.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print the result as CSV.")
@admin_options
@click.pass_context
def command(
    context: click.Context,
    /,
    first: date | None,
    last: date | None,
    groups: tuple[str, ...],
    at: AdminBackend,
    as_json: bool,
    as_csv: bool,
    **only: str | None,
) -> None:
    """Show usage and its cost: requests, tokens and US dollars.

    Without --by, one line per tenant and model. Input tokens include those found in the engine's cache, which have a
    price of their own.
    """
    from llmops.control.admin.operations import READ_USAGE
    from llmops.control.admin.schemas import UsageReportQuery

    if context.invoked_subcommand is not None:
        return
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other; give one of them.")
    groups = tuple(dict.fromkeys(groups)) or ("tenant", "model")
    only["key"] = only["key"] and key_reference(only["key"])
    found = at.do(READ_USAGE, UsageReportQuery(**typed_values({**only, "first": first, "last": last, "by": groups})))
    if as_json:
        print_json(found.data())
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*groups, *COUNTED], lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for line in found.lines:
            writer.writerow(
                {name: escape_unsafe(one) if isinstance(one, str) else one for name, one in line.data().items()}
            )
    else:
        _show(found, groups, f"{found.period.first} to {found.period.last} (UTC)")


@command.command("reconcile")
@click.option(
    "--engine", "engines", multiple=True, metavar="URL", help="Triton metrics page to compare with; may be repeated."
)
@admin_options
def reconcile(engines: tuple[str, ...], at: AdminBackend, as_json: bool) -> None:
    """List events that gateways have recorded and the ledger lacks.

    A running gateway sends them again by itself. Exit code 1 when something is missing.
    """
    from llmops.control.admin.operations import RECONCILE
    from llmops.control.admin.schemas import ReconciliationRequest
    from llmops.control.reconcile import served_tokens

    report = at.do(RECONCILE, ReconciliationRequest(served=asyncio.run(served_tokens(engines))))
    if as_json:
        print_json(report.data())
    else:
        _show_report(report)
    if report.missing:
        raise SystemExit(1)


@command.command("dead-letters")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="At most this many.")
@admin_options
def dead_letters(limit: int, at: AdminBackend, as_json: bool) -> None:
    """List usage events that are on no bill, with the reason, newest first."""
    from llmops.control.admin.operations import LIST_DEAD_LETTERS
    from llmops.control.admin.schemas import DeadLetterListQuery

    found = at.do(LIST_DEAD_LETTERS, DeadLetterListQuery(limit=limit))
    if as_json:
        print_json([one.data() for one in found])
    elif not found:
        click.echo("No event is parked.", err=True)
    else:
        rows = [
            [format_timestamp(one.last_at), one.reason, one.source, "yes" if one.signed else "no", f"{one.count:,}"]
            for one in found
        ]
        show_table(("last", "reason", "source", "signed", "count"), rows, ("count",))


def _show_report(report: Reconciliation) -> None:
    if report.missing:
        rows = [[gap.gateway, f"{gap.first}-{gap.last}", f"{gap.since:%Y-%m-%d %H:%M} UTC"] for gap in report.gaps]
        show_table(("gateway", "events", "missing since"), rows)
    click.echo(f"Missing: {report.missing:,} events (gateway workers known: {report.gateways:,}).")
    if report.engines:
        counts = [(one.served, one.billed, one.unbilled) for one in report.engines]
        cells = [["" if count is None else f"{count:,}" for count in line] for line in counts]
        rows = [[one.model, *line] for one, line in zip(report.engines, cells, strict=True)]
        show_table(("model", "served", "billed", "unbilled since"), rows, ("served", "billed", "unbilled since"))


def _show(found: UsageReport, groups: Sequence[str], period: str) -> None:
    if not found.lines:
        click.echo(f"No usage, {period}.", err=True)
        return
    right = ("requests", "input", "cached", "output", "cost")
    rows = [[*_groups(line, groups), *_cells(line)] for line in found.lines]
    rows.append(["total", *[""] * (len(groups) - 1), *_cells(found)])
    click.echo(f"{period}")
    show_table((*groups, *right), rows, right)


def _groups(line: UsageLine, groups: Sequence[str]) -> list[Any]:
    return [getattr(line, name) for name in groups]


def _cells(one: UsageTotals) -> list[str]:
    return [*(f"{getattr(one, name):,}" for name in COUNTS), format_usd(one.cost_micros)]
