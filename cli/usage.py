"""`llmops usage`: usage and its cost, and checks of the ledger."""

from __future__ import annotations

import asyncio
import csv
import re
import sys
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

import click

from llmops.cli.accounts.account_options import admin_options
from llmops.cli.accounts.admin_client import AdminClient, key_reference
from llmops.cli.accounts.param_types import DAY, typed_values
from llmops.cli.options import reject_other_options
from llmops.cli.output import format_timestamp, print_json, print_results, print_table
from llmops.units import format_usd
from llmops.untrusted_text import escape_unsafe

if TYPE_CHECKING:
    from llmops.control.admin.schemas import DeadLetterRead, Reconciliation, UsageReport, UsageTotals

GROUPS = ("day", "tenant", "user", "model", "key")
#: Columns of the table and of the CSV output.
COUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
CSV_COLUMNS = (*COUNTS, "reasoning_tokens", "cost_micros", "cost_usd")

#: The place before a formula. Spreadsheets of some languages separate cells by semicolons, and
#: spreadsheets of others take fullwidth signs for = + @ and -.
_FORMULA = re.compile("(?:^|(?<=;))\\s*(?=[=+@\uff1d\uff0b\uff20\uff0d-])")


@click.group("usage", invoke_without_command=True)
@click.option("--tenant", help="Only usage of this tenant, even if deleted.")
@click.option("--user", metavar="EMAIL", help="Only usage of this user.")
@click.option("--key", help="Only usage of this key.")
@click.option("--model", help="Only usage of this model.")
@click.option("--from", "first", type=DAY, help="First day (UTC).  [default: the first of this month]")
@click.option("--to", "last", type=DAY, help="Last day (UTC), included.  [default: today]")
@click.option(
    "--by", "groups", type=click.Choice(GROUPS), multiple=True, help="Group usage by this field; may be repeated."
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
    admin: AdminClient,
    as_json: bool,
    as_csv: bool,
    **filters: str | None,
) -> None:
    """Show usage and its cost: requests, tokens and US dollars.

    Without --by, one line per tenant and model. Input tokens include those found in the engine's
    cache, which have a price of their own.
    """
    from llmops.control.admin.schemas import UsageReport, UsageReportQuery

    if context.invoked_subcommand is not None:
        reject_other_options(f"The options of {context.invoked_subcommand} follow its name")
        return
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other; give one of them.")
    groups = tuple(dict.fromkeys(groups)) or ("tenant", "model")
    filters["key"] = filters["key"] and key_reference(filters["key"])
    query = UsageReportQuery(**typed_values({**filters, "first": first, "last": last, "by": groups}))
    report = admin.request("GET", ("usage",), UsageReport, query=query)
    if as_json:
        print_json(report.data())
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*groups, *CSV_COLUMNS], lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for line in report.lines:
            writer.writerow(
                {name: _csv_text(cell) if isinstance(cell, str) else cell for name, cell in line.data().items()}
            )
    else:
        _print_report(report, groups)


@command.command("reconcile")
@click.option(
    "--engine", "engines", multiple=True, metavar="URL", help="Triton metrics page to compare with; may be repeated."
)
@admin_options
def reconcile(engines: tuple[str, ...], admin: AdminClient, as_json: bool) -> None:
    """List events that gateways have recorded and the ledger lacks.

    A running gateway sends them again by itself. The exit code is 1 if something is missing.
    """
    from llmops.control.admin.schemas import Reconciliation, ReconciliationRequest
    from llmops.control.reconcile import served_tokens

    report = admin.request(
        "POST",
        ("usage", "reconcile"),
        Reconciliation,
        body=ReconciliationRequest(served=asyncio.run(served_tokens(engines))),
    )
    if as_json:
        print_json(report.data())
    else:
        _print_reconciliation(report)
    if report.missing:
        raise SystemExit(1)


@command.command("dead-letters")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, help="Maximum number of events.")
@admin_options
def dead_letters(limit: int, admin: AdminClient, as_json: bool) -> None:
    """List usage events that could not be billed, with the reason.

    Events that a gateway signed come first. Both signed and unsigned events are sorted from new to
    old.
    """
    from llmops.control.admin.schemas import DeadLetterListQuery, DeadLetterRead

    letters = admin.request(
        "GET", ("usage", "dead-letters"), tuple[DeadLetterRead, ...], query=DeadLetterListQuery(limit=limit)
    )
    columns = ("last", "reason", "source", "signed", "count")
    print_results(letters, as_json, "All usage events could be billed.", columns, _dead_letter_row, ("count",))


def _csv_text(text: str) -> str:
    """Return a text that no spreadsheet evaluates, because a user's name may be a formula."""
    return escape_unsafe(_FORMULA.sub("'", text))


def _dead_letter_row(one: DeadLetterRead) -> list[str]:
    return [format_timestamp(one.last_at), one.reason, one.source, "yes" if one.signed else "no", f"{one.count:,}"]


def _print_reconciliation(report: Reconciliation) -> None:
    if report.missing:
        print_table(("gateway", "missing"), [[gap.gateway, f"{gap.first}-{gap.last}"] for gap in report.gaps])
    click.echo(f"Missing: {report.missing:,} events (gateway workers known: {report.gateways:,}).")
    if report.engines:
        rows = [
            [engine.model, *(f"{count:,}" if count is not None else "" for count in counts)]
            for engine in report.engines
            for counts in [(engine.served, engine.billed, engine.unbilled)]
        ]
        print_table(("model", "served", "billed", "unbilled since"), rows, ("served", "billed", "unbilled since"))


def _print_report(report: UsageReport, groups: Sequence[str]) -> None:
    period = f"{report.period.first} to {report.period.last} (UTC)"
    if not report.lines:
        click.echo(f"No usage, {period}.", err=True)
        return
    right = ("requests", "input", "cached", "output", "cost")
    rows = [[*(getattr(line, name) for name in groups), *_cells(line)] for line in report.lines]
    rows.append(["total", *[""] * (len(groups) - 1), *_cells(report)])
    click.echo(period)
    print_table((*groups, *right), rows, right)


def _cells(totals: UsageTotals) -> list[str]:
    return [*(f"{getattr(totals, name):,}" for name in COUNTS), format_usd(totals.cost_micros)]
