"""`llmops audit`: the log of administrative changes, rejected requests and safety findings."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.account_options import admin_options
from llmops.cli.accounts.admin_client import AdminClient
from llmops.cli.accounts.param_types import DURATION, typed_values
from llmops.cli.output import format_timestamp, print_results
from llmops.input_files import MALFORMED
from llmops.units import format_usd

if TYPE_CHECKING:
    from llmops.control.admin.schemas import AuditEntryRead


@click.command("audit")
@click.option("--tenant", help="Only entries of this tenant.")
@click.option("--action", help="Only actions with this prefix: key., tenant.delete, access., safety.")
@click.option("--last", type=DURATION, help="Only entries of the last 12h or 7d.")
@click.option("--all", "everything", is_flag=True, help="Also refusals, and findings of safety filters.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, help="Maximum number of entries.")
@admin_options
def command(
    tenant: str | None, action: str | None, last: timedelta | None, everything: bool, limit: int, admin: AdminClient,
    as_json: bool,
) -> None:  # fmt: skip
    """Show who changed what, and who was refused, newest first.

    Refusals and findings of safety filters are counted per minute, and shown with --all, or with an
    --action that names them: a flood of them must not hide the changes. Findings do not contain the
    text.
    """
    from llmops.control.admin.schemas import AuditEntryRead, AuditQuery

    since: datetime | None = datetime.now(UTC) - last if last else None
    given = typed_values({"tenant": tenant, "action": action, "since": since})
    query = AuditQuery(**given, changes_only=action is None and not everything, limit=limit)
    entries = admin.request("GET", ("audit",), tuple[AuditEntryRead, ...], query=query)
    columns = ("when", "who", "did", "to", "tenant", "detail")
    hint = "No change is on record; --all shows refusals and findings, too."
    print_results(entries, as_json, hint if query.changes_only else "Nothing is on record.", columns, _row)


def _row(entry: AuditEntryRead) -> list[str]:
    # show null only in an update, where it removes a limit
    update = entry.action.endswith(".update")
    detail = ", ".join(_detail_text(name, value) for name, value in entry.detail.items() if update or value is not None)
    return [format_timestamp(entry.created_at), entry.actor, entry.action, entry.subject, entry.tenant or "", detail]


def _detail_text(name: str, value: Any) -> str:
    if value is None:
        return f"{name} none"
    # a damaged amount is shown as it is
    with suppress(*MALFORMED):
        if name.endswith("_micros"):
            return f"{name.removesuffix('_micros')} {format_usd(value)}"
        if name == "budget":
            return f"budget {format_usd(value['micros'])}/{value['period']}"
    return f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
