"""`llmops audit`: who changed what, and who was refused."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.administration import Administration
from llmops.cli.accounts.options import admin_options
from llmops.cli.accounts.tables import print_json, when
from llmops.cli.accounts.tables import show as show_table
from llmops.cli.accounts.types import DurationType, given_of
from llmops.money import dollars

if TYPE_CHECKING:
    from llmops.control.admin.wire import AuditEntry


@click.command("audit")
@click.option("--tenant", help="Only entries of this tenant.")
@click.option("--action", help="Only actions with this prefix: key., tenant.delete, access.")
@click.option("--last", type=DurationType(), help="Only entries of the last 12h or 7d.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="At most this many entries."
)
@admin_options
def command(
    tenant: str | None, action: str | None, last: timedelta | None, limit: int, at: Administration, as_json: bool
) -> None:
    """Show who changed what, and who was refused, newest first.

    Refusals are counted per minute, so that a flood of them takes only a few lines.
    """
    from llmops.control.admin.operations import READ_AUDIT
    from llmops.control.admin.wire import AuditWanted

    since: datetime | None = datetime.now(timezone.utc) - last if last else None
    wanted = AuditWanted(**given_of({"tenant": tenant, "action": action, "since": since}), limit=limit)
    found = at.do(READ_AUDIT, wanted)
    if as_json:
        print_json([entry.data() for entry in found])
    elif not found:
        click.echo("Nothing is on record.", err=True)
    else:
        show_table(("when", "who", "did", "to", "tenant", "detail"), [_row(entry) for entry in found])


def _row(entry: AuditEntry) -> list[str]:
    # what was taken away is told; what was never given is not
    taken = entry.action.endswith(".update")
    told = ", ".join(_told(name, value) for name, value in entry.detail.items() if taken or value is not None)
    return [when(entry.created_at), entry.actor, entry.action, entry.subject, entry.tenant or "", told]


def _told(name: str, value: Any) -> str:
    if value is None:
        return f"{name} none"
    if name.endswith("_micros"):
        return f"{name.removesuffix('_micros')} {dollars(value)}"
    if name == "budget":
        return f"budget {dollars(value['micros'])}/{value['period']}"
    return f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
