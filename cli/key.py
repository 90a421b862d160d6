"""`llmops key`: who may ask, and how much."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.administration import Administration, key_name
from llmops.cli.accounts.options import admin_options, limit_options
from llmops.cli.accounts.tables import (
    budget_text,
    dollars,
    limits_text,
    print_json,
    show_pairs,
    when,
)
from llmops.cli.accounts.tables import show as show_table
from llmops.cli.accounts.types import DurationType, MomentType, NamesType, given_of

if TYPE_CHECKING:
    from llmops.control.admin import wire


def spec_options(command: Any) -> Any:
    """What is decided about a key."""
    for option in (
        click.option(
            "--expires",
            "expires_at",
            type=MomentType(never=True),
            help="When: 90d, 12h, 2027-01-31 (UTC), or never.",
        ),
        click.option("--models", type=NamesType(everything=True), help="Only these models; or all."),
        click.option(
            "--scopes", type=NamesType(), help="Of inference, usage, metrics, admin, fairness.  [default: inference]"
        ),
        click.option("--tier", help="Tier of its requests, any name you use.  [default: the user's, or free]"),
        click.option("--name", help="What it is for."),
    ):
        command = option(command)
    return limit_options(command)


@click.group("key")
def command() -> None:
    """API keys: made, changed, replaced and revoked.

    A key belongs to a user of a tenant. KEY is its id (key-…), or the key itself.
    """


@command.command("create")
@click.option("--tenant", required=True, help="The tenant who pays; `llmops tenant create` makes one.")
@click.option("--user", required=True, metavar="EMAIL", help="Its user; a new address creates one.")
@spec_options
@admin_options
def create(tenant: str, user: str, at: Administration, as_json: bool, **given: Any) -> None:
    """Make a key and print it, this once."""
    from llmops.control.admin.operations import CREATE_KEY
    from llmops.control.admin.wire import NewKey

    made = at.do(CREATE_KEY, NewKey(tenant=tenant, user=user, **given_of(given)))
    _show_secret(made, as_json, f"{made.id} for {made.user} of {made.tenant}: {_summary(made)}.")


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@click.option("--user", metavar="EMAIL", help="Only this user's.")
@click.option("--all", "everything", is_flag=True, help="Also revoked and expired ones.")
@admin_options
def list_(tenant: str | None, user: str | None, everything: bool, at: Administration, as_json: bool) -> None:
    """Keys with their limits, never the keys themselves."""
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
    """One key, what is spent of its budget, and its tenant's limits."""
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
    """Change what is named, and nothing else; `none`, `all` and `never` take a limit away."""
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
    """Another secret for the same key, printed this once: id, limits and what is spent stay.

    With --overlap 0 the present one is refused at once, as when it leaked. One that was rotated before, and still has
    time, is refused at once in any case.
    """
    from llmops.control.admin.operations import ROTATE_KEY
    from llmops.control.admin.wire import Rotation

    rotated = at.do(ROTATE_KEY, Rotation(key=key_name(key), overlap_seconds=overlap.total_seconds()))
    _show_secret(rotated, as_json, f"{rotated.id}: the one before works until {when(rotated.previous_until)} UTC.")


@command.command("revoke")
@click.argument("key")
@admin_options
def revoke(key: str, at: Administration, as_json: bool) -> None:
    """Revoke a key permanently."""
    from llmops.control.admin.operations import REVOKE_KEY
    from llmops.control.admin.wire import KeyName

    revoked = at.do(REVOKE_KEY, KeyName(key=key_name(key)))
    if as_json:
        print_json(revoked.data())
    else:
        click.echo(f"{revoked.id} of {revoked.user} is revoked; its usage stays on the bill.")


def _show_secret(key: wire.MadeKey, as_json: bool, said: str) -> None:
    if as_json:
        print_json(key.data())
        return
    # the key alone, so that a script can take it
    click.echo(f"{said} The key is shown this once:", err=True)
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
        ("expires", when(key.expires_at)),
        ("rotated", f"the one before works until {when(key.previous_until)} UTC" if rest else ""),
    ]
    return [(name, value) for name, value in pairs if value]
