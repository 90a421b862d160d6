"""`llmops key`: who may ask, and how much."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.administration import Administration, key_name
from llmops.cli.accounts.options import admin_options, limit_options
from llmops.cli.accounts.tables import budget_text, limits_text, print_json, show_pairs, when
from llmops.cli.accounts.tables import show as show_table
from llmops.cli.accounts.types import DurationType, MomentType, NamesType, given_of
from llmops.money import dollars

if TYPE_CHECKING:
    from llmops.control.admin import wire


def spec_options(command: Any) -> Any:
    """What is decided about a key."""
    for option in (
        click.option(
            "--expires",
            "expires_at",
            type=MomentType(never=True),
            help="Expires in 90d or 12h, on 2027-01-31 (UTC), or never.",
        ),
        click.option("--models", type=NamesType(everything=True), help="Models it may use, or all."),
        click.option(
            "--scopes",
            type=NamesType(),
            help="Any of inference, usage, metrics, admin, fairness.  [default: inference]",
        ),
        click.option("--tier", help="Tier of its requests; any name.  [default: the user's, or free]"),
        click.option("--name", help="What the key is for."),
    ):
        command = option(command)
    return limit_options(command)


@click.group("key")
def command() -> None:
    """Create, change, rotate and revoke API keys.

    A key belongs to a user of a tenant. KEY is its id (key-…) or the key itself.
    """


@command.command("create")
@click.option("--tenant", required=True, help="The tenant that pays; see `llmops tenant create`.")
@click.option("--user", required=True, metavar="EMAIL", help="The user it belongs to; created if new.")
@spec_options
@admin_options
def create(tenant: str, user: str, at: Administration, as_json: bool, **given: Any) -> None:
    """Create a key and print it; it cannot be shown again."""
    from llmops.control.admin.operations import CREATE_KEY
    from llmops.control.admin.wire import NewKey

    made = at.do(CREATE_KEY, NewKey(tenant=tenant, user=user, **given_of(given)))
    _show_secret(made, as_json, f"{made.id} for {made.user} of {made.tenant}: {_summary(made)}.")


@command.command("list")
@click.option("--tenant", help="Only keys of this tenant.")
@click.option("--user", metavar="EMAIL", help="Only keys of this user.")
@click.option("--all", "everything", is_flag=True, help="Include revoked and expired keys.")
@admin_options
def list_(tenant: str | None, user: str | None, everything: bool, at: Administration, as_json: bool) -> None:
    """List keys and their limits, but not their secrets."""
    from llmops.control.admin.operations import LIST_KEYS
    from llmops.control.admin.wire import KeysWanted

    keys = at.do(LIST_KEYS, KeysWanted(**given_of({"tenant": tenant, "user": user}), all=everything))
    if as_json:
        print_json([key.data() for key in keys])
        return
    if not keys:
        click.echo("No keys. Make one: llmops key create --tenant NAME --user EMAIL", err=True)
        return
    columns = ("key", "tenant", "user", "tier", "limits", "budget", "state", "begins", "models", "name")
    show_table(columns, [_row(key) for key in keys], narrow=7)


@command.command("show")
@click.argument("key")
@admin_options
def show(key: str, at: Administration, as_json: bool) -> None:
    """Show a key, how much of its budget is spent, and its tenant's limits."""
    from llmops.control.admin.operations import SHOW_KEY
    from llmops.control.admin.wire import KeyName

    found = at.do(SHOW_KEY, KeyName(key=key_name(key)))
    if as_json:
        print_json(found.data())
    else:
        show_pairs(_pairs(found))


@command.command("update")
@click.argument("key")
@spec_options
@admin_options
def update(key: str, at: Administration, as_json: bool, **given: Any) -> None:
    """Change only what the options name; `none`, `all` and `never` lift a limit."""
    from llmops.control.admin.operations import UPDATE_KEY
    from llmops.control.admin.wire import KeyChange

    if not given_of(given):
        raise click.UsageError("Nothing to change; give an option, e.g. --rpm 120.")
    updated = at.do(UPDATE_KEY, KeyChange(key=key_name(key), **given_of(given)))
    if as_json:
        print_json(updated.data())
    else:
        click.echo(f"{updated.id}: {_summary(updated)}.")


@command.command("rotate")
@click.argument("key")
@click.option(
    "--overlap", type=DurationType(), default="24h", show_default=True, help="How long the old secret keeps working."
)
@admin_options
def rotate(key: str, overlap: timedelta, at: Administration, as_json: bool) -> None:
    """Give a key a new secret and print it; id, limits and spending stay.

    Use --overlap 0 if the old secret has leaked: it stops working at once. A still older one, from an earlier rotation,
    always does.
    """
    from llmops.control.admin.operations import ROTATE_KEY
    from llmops.control.admin.wire import Rotation

    rotated = at.do(ROTATE_KEY, Rotation(key=key_name(key), overlap_seconds=overlap.total_seconds()))
    _show_secret(rotated, as_json, f"{rotated.id}: the old secret works until {when(rotated.previous_until)} UTC.")


@command.command("revoke")
@click.argument("key")
@click.option("--now", is_flag=True, help="Also end its running answers, within 30 seconds.")
@admin_options
def revoke(key: str, now: bool, at: Administration, as_json: bool) -> None:
    """Revoke a key permanently.

    Gateways refuse it within 30 seconds. Answers that are running come to their end unless --now is given.
    """
    from llmops.control.admin.operations import REVOKE_KEY
    from llmops.control.admin.wire import Revocation

    revoked = at.do(REVOKE_KEY, Revocation(key=key_name(key), now=now))
    if as_json:
        print_json(revoked.data())
    else:
        click.echo(f"{revoked.id} of {revoked.user} is revoked; its usage stays on the bill.")


def _show_secret(key: wire.MadeKey, as_json: bool, said: str) -> None:
    if as_json:
        print_json(key.data())
        return
    # the key alone, so that a script can take it
    click.echo(f"{said} The key is shown only once:", err=True)
    click.echo(key.key)


def _summary(key: wire.Key) -> str:
    parts = [f"tier {key.tier}", limits_text(key), budget_text(key), f"for {', '.join(key.scopes)}"]
    parts += [f"only {', '.join(key.models)}"] if key.models else []
    parts += [f"until {when(key.expires_at)} UTC"] if key.expires_at else []
    return ", ".join(parts)


def _row(key: wire.Key) -> list[str]:
    state = key.state
    if state == "active" and key.expires_at:
        state = f"until {key.expires_at:%Y-%m-%d}"
    models = "all" if key.models is None else ", ".join(key.models)
    owner = [key.id, key.tenant, key.user, key.tier]
    limits = [limits_text(key, short=True), budget_text(key), state]
    return [*owner, *limits, f"{key.begins}…", models, key.name or ""]


def _pairs(key: wire.ShownKey) -> list[tuple[str, str]]:
    rest = key.previous_until and key.previous_until > datetime.now(timezone.utc)
    spent = f", {dollars(key.spent_micros)} spent" if key.spent_micros is not None else ""
    of_all = f"{limits_text(key.tenant_limits)}, {budget_text(key.tenant_limits)} for all keys of {key.tenant}"
    pairs = [
        ("key", f"{key.id} ({key.begins}…)"),
        ("state", key.state),
        ("name", key.name or ""),
        ("user", f"{key.user} of {key.tenant}"),
        ("tier", key.tier),
        ("scopes", ", ".join(key.scopes)),
        ("models", "all" if key.models is None else ", ".join(key.models)),
        ("limits", limits_text(key)),
        ("budget", budget_text(key) + spent),
        ("tenant", of_all),
        ("made", f"{when(key.created_at)} UTC"),
        ("expires", f"{when(key.expires_at)} UTC" if key.expires_at else "never"),
        ("rotated", f"the old secret works until {when(key.previous_until)} UTC" if rest else ""),
    ]
    return [(name, value) for name, value in pairs if value]
