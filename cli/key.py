"""`llmops key`: create, change, rotate and revoke API keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.account_options import admin_options, limit_options
from llmops.cli.accounts.admin_client import AdminClient, key_reference, or_damaged
from llmops.cli.accounts.param_types import DURATION, EXPIRY, NAMES, NAMES_OR_ALL, typed_values
from llmops.cli.options import add_options
from llmops.cli.output import (
    format_budget,
    format_limits,
    format_timestamp,
    print_fields,
    print_json,
    print_line,
    print_result,
    print_results,
)
from llmops.units import format_usd

if TYPE_CHECKING:
    from llmops.control.admin import schemas


#: Options of commands that set a key's limits, name, tier, scopes, models and expiry.
spec_options = add_options(
    limit_options,
    click.option("--name", help="The purpose of the key."),
    click.option("--tier", help="Tier of the key's requests; any name.  [default: the user's, or free]"),
    click.option(
        "--scopes",
        type=NAMES,
        help="Scopes of the key: any of inference, usage, metrics, admin, fairness.  [default: inference]",
    ),
    click.option("--models", type=NAMES_OR_ALL, help="Models that the key may use, or all."),
    click.option(
        "--expires",
        "expires_at",
        type=EXPIRY,
        help="Expires in 90d or 12h, on 2027-01-31 (UTC), or never.",
    ),
)


@click.group("key")
def command() -> None:
    """Create, change, rotate and revoke API keys.

    A key belongs to a user of a tenant. KEY is its id (key-…) or the key itself.
    """


@command.command("create")
@click.option("--tenant", required=True, help="The tenant that pays; see `llmops tenant create`.")
@click.option("--user", required=True, metavar="EMAIL", help="The user of the key, created if new.")
@spec_options
@admin_options
def create(tenant: str, user: str, admin: AdminClient, as_json: bool, **settings: Any) -> None:
    """Create a key and print it; it cannot be shown again."""
    from llmops.control.admin.schemas import KeyCreate, KeyWithSecret

    body = KeyCreate(tenant=tenant, user=user, **typed_values(settings))
    key = admin.request("POST", ("keys",), KeyWithSecret, body=body)
    _print_secret(key, as_json, f"{key.id} for {key.user} of {key.tenant}: {_summary(key)}.")


@command.command("list")
@click.option("--tenant", help="Only keys of this tenant.")
@click.option("--user", metavar="EMAIL", help="Only keys of this user.")
@click.option("--all", "everything", is_flag=True, help="Include revoked and expired keys.")
@admin_options
def list_(tenant: str | None, user: str | None, everything: bool, admin: AdminClient, as_json: bool) -> None:
    """List keys and their limits, but not their secrets."""
    from llmops.control.admin.schemas import KeyListQuery, KeyRead

    query = KeyListQuery(**typed_values({"tenant": tenant, "user": user}), all=everything)
    keys = admin.request("GET", ("keys",), tuple[KeyRead, ...], query=query)
    columns = ("key", "tenant", "user", "tier", "limits", "budget", "state", "prefix", "models", "name")
    empty = "No keys. Make one: llmops key create --tenant NAME --user EMAIL"
    print_results(keys, as_json, empty, columns, _row, narrow=7)


@command.command("show")
@click.argument("key")
@admin_options
def show(key: str, admin: AdminClient, as_json: bool) -> None:
    """Show a key, how much of its budget is spent, and its tenant's limits."""
    from llmops.control.admin.schemas import KeyDetails

    found = admin.request("GET", ("keys", key_reference(key)), KeyDetails)
    if as_json:
        print_json(found.data())
    else:
        print_fields(_pairs(found))


@command.command("update")
@click.argument("key")
@spec_options
@admin_options
def update(key: str, admin: AdminClient, as_json: bool, **settings: Any) -> None:
    """Change the properties that options name; `none`, `all` and `never` lift a limit."""
    from llmops.control.admin.schemas import KeyRead, KeyUpdate

    if not typed_values(settings):
        raise click.UsageError("Nothing to change; give an option, e.g. --rpm 120.")
    updated = admin.request("PATCH", ("keys", key_reference(key)), KeyRead, body=KeyUpdate(**typed_values(settings)))
    print_result(updated, as_json, f"{updated.id}: {_summary(updated)}.")


@command.command("rotate")
@click.argument("key")
@click.option("--overlap", type=DURATION, default="24h", help="How long the old secret keeps working.")
@admin_options
def rotate(key: str, overlap: timedelta, admin: AdminClient, as_json: bool) -> None:
    """Give a key a new secret and print it; id, limits and spending stay.

    With --overlap 0 the old secret stops working at once; use it if the secret has leaked. An older
    secret that an earlier rotation still allows always stops working at once. When a secret stops
    working, its running answers end within 30 seconds; those of the new secret go on.
    """
    from llmops.control.admin.schemas import KeyRotate, KeyWithSecret

    body = KeyRotate(overlap_seconds=overlap.total_seconds())
    rotated = admin.request("POST", ("keys", key_reference(key), "rotate"), KeyWithSecret, body=body)
    _print_secret(
        rotated, as_json, f"{rotated.id}: the old secret works until {format_timestamp(rotated.previous_until)} UTC."
    )


@command.command("revoke")
@click.argument("key")
@click.option("--now", is_flag=True, help="Also end its running answers, within 30 seconds.")
@admin_options
def revoke(key: str, now: bool, admin: AdminClient, as_json: bool) -> None:
    """Revoke a key permanently.

    Gateways refuse it within 30 seconds. Answers that are running come to their end unless --now is
    given.
    """
    from llmops.control.admin.schemas import KeyRead, KeyRevoke

    path = ("keys", key_reference(key), "revoke")
    revoked = admin.request("POST", path, or_damaged(KeyRead), body=KeyRevoke(now=now))
    named = f"{revoked.id} of {revoked.user}" if isinstance(revoked, KeyRead) else f"{revoked.id}, which is damaged,"
    print_result(revoked, as_json, f"{named} is revoked; its usage stays on the bill.")


def _print_secret(key: schemas.KeyWithSecret, as_json: bool, message: str) -> None:
    if as_json:
        print_json(key.data())
        return
    # print only the key on standard output, so that a script can read it
    print_line(f"{message} The key is shown only once:", err=True)
    print_line(key.key)


def _summary(key: schemas.KeyRead) -> str:
    parts = [f"tier {key.tier}", format_limits(key), format_budget(key), f"for {', '.join(key.scopes)}"]
    parts += [f"only {', '.join(key.models)}"] if key.models else []
    parts += [f"until {format_timestamp(key.expires_at)} UTC"] if key.expires_at else []
    return ", ".join(parts)


def _row(key: schemas.KeyRead) -> list[str]:
    state = key.state
    if state == "active" and key.expires_at:
        state = f"until {key.expires_at:%Y-%m-%d}"
    models = "all" if key.models is None else ", ".join(key.models)
    owner = [key.id, key.tenant, key.user, key.tier]
    limits = [format_limits(key, short=True), format_budget(key), state]
    return [*owner, *limits, f"{key.prefix}…", models, key.name or ""]


def _pairs(key: schemas.KeyDetails) -> list[tuple[str, str]]:
    overlaps = key.previous_until and key.previous_until > datetime.now(UTC)
    spent = f", {format_usd(key.spent_micros)} spent" if key.spent_micros is not None else ""
    tenant_limits = (
        f"{format_limits(key.tenant_limits)}, {format_budget(key.tenant_limits)} for all keys of {key.tenant}"
    )
    pairs = [
        ("key", f"{key.id} ({key.prefix}…)"),
        ("state", key.state),
        ("name", key.name or ""),
        ("user", f"{key.user} of {key.tenant}"),
        ("tier", key.tier),
        ("scopes", ", ".join(key.scopes)),
        ("models", "all" if key.models is None else ", ".join(key.models)),
        ("limits", format_limits(key)),
        ("budget", format_budget(key) + spent),
        ("tenant", tenant_limits),
        ("created", f"{format_timestamp(key.created_at)} UTC"),
        ("expires", f"{format_timestamp(key.expires_at)} UTC" if key.expires_at else "never"),
        ("rotated", f"the old secret works until {format_timestamp(key.previous_until)} UTC" if overlaps else ""),
    ]
    return [(name, value) for name, value in pairs if value]
