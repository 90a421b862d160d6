"""`llmops key`: who may ask, and how much."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.options import changed_limits, limit_options, store_options
from llmops.cli.accounts.store import myself, reading, writing
from llmops.cli.accounts.tables import (
    budget_text,
    dollars,
    key_data,
    limits_data,
    limits_text,
    print_json,
    show_pairs,
    when,
)
from llmops.cli.accounts.tables import show as show_table
from llmops.cli.accounts.types import DurationType, MomentType, NamesType, changed

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from llmops.store.accounts.keys import KeyRow, KeySpec


def spec_options(command: Any) -> Any:
    """What is decided about a key."""
    for option in (
        click.option("--expires", type=MomentType(never=True), help="When: 90d, 12h, 2027-01-31 (UTC), or never."),
        click.option("--models", type=NamesType(everything=True), help="Only these models; or all."),
        click.option(
            "--scopes", type=NamesType(), help="Of inference, usage, metrics, admin.  [default: inference,usage]"
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
@store_options
def create(tenant: str, user: str, store: str | None, as_json: bool, **given: Any) -> None:
    """Make a key and print it, this once."""
    by = myself()

    async def work(connection: AsyncConnection) -> tuple[KeyRow, str]:
        from llmops.store.accounts.keys import KeySpec, create_key
        from llmops.store.accounts.tenants import require_tenant
        from llmops.store.accounts.users import DEFAULT_TIER, ensure_user

        await require_tenant(connection, tenant)
        owner = await ensure_user(connection, tenant, user, by, given["tier"] or DEFAULT_TIER)
        return await create_key(connection, owner, _spec(KeySpec(tier=owner.tier), given), by)

    key, secret = writing(store, work)
    _show_secret(key, secret, by.at, as_json, f"{key.id} for {key.email} of {key.tenant_id}: {_summary(key.spec)}.")


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@click.option("--user", metavar="EMAIL", help="Only this user's.")
@click.option("--all", "everything", is_flag=True, help="Also revoked and expired ones.")
@store_options
def list_(tenant: str | None, user: str | None, everything: bool, store: str | None, as_json: bool) -> None:
    """Keys with their limits, never the keys themselves."""
    now = myself().at

    async def work(connection: AsyncConnection) -> list[KeyRow]:
        from llmops.store.accounts.keys import list_keys
        from llmops.store.accounts.tenants import require_tenant
        from llmops.store.accounts.users import require_user

        if tenant:
            await require_tenant(connection, tenant)
        owner = await require_user(connection, user) if user else None
        found = await list_keys(connection, tenant, owner.id if owner else None)
        return [key for key in found if everything or key.state(now) == "active"]

    keys = reading(store, work)
    if as_json:
        print_json([key_data(key, now) for key in keys])
        return
    if not keys:
        click.echo("No keys. Make one: llmops key create --tenant NAME --user EMAIL", err=True)
        return
    columns = ("key", "tenant", "user", "tier", "limits", "budget", "state", "begins", "models", "name")
    show_table(columns, [_row(key, now) for key in keys], narrow=7)


@command.command("show")
@click.argument("key")
@store_options
def show(key: str, store: str | None, as_json: bool) -> None:
    """One key, what is spent of its budget, and its tenant's limits."""
    now = myself().at

    async def work(connection: AsyncConnection) -> tuple[KeyRow, int | None]:
        from llmops.store.accounts.keys import require_key
        from llmops.store.usage import spent_micros

        found = await require_key(connection, key)
        budget = found.spec.limits.budget
        return found, await spent_micros(connection, budget.begins(now), key_id=found.id) if budget else None

    found, spent = reading(store, work)
    if as_json:
        print_json(key_data(found, now) | {"spent_micros": spent, "tenant_limits": limits_data(found.tenant_limits)})
        return
    show_pairs(_pairs(found, spent, now))


@command.command("update")
@click.argument("key")
@spec_options
@store_options
def update(key: str, store: str | None, as_json: bool, **given: Any) -> None:
    """Change what is named, and nothing else; `none`, `all` and `never` take a limit away."""
    if all(value is None for value in given.values()):
        raise click.UsageError("Nothing to change; give an option, e.g. --rpm 120.")
    by = myself()

    async def work(connection: AsyncConnection) -> KeyRow:
        from llmops.store.accounts.keys import require_key, update_key

        found = await require_key(connection, key)
        return await update_key(connection, found, _spec(found.spec, given), by)

    updated = writing(store, work)
    if as_json:
        print_json(key_data(updated, by.at))
    else:
        click.echo(f"{updated.id}: {_summary(updated.spec)}.")


@command.command("rotate")
@click.argument("key")
@click.option(
    "--overlap", type=DurationType(), default="24h", show_default=True, help="How long the old secret keeps working."
)
@store_options
def rotate(key: str, overlap: timedelta, store: str | None, as_json: bool) -> None:
    """Another secret for the same key, printed this once: id, limits and what is spent stay.

    With --overlap 0 the present one is refused at once, as when it leaked. One that was rotated before, and still has
    time, is refused at once in any case.
    """
    by = myself()

    async def work(connection: AsyncConnection) -> tuple[KeyRow, str]:
        from llmops.store.accounts.keys import require_key, rotate_key

        found = await require_key(connection, key)
        secret = await rotate_key(connection, found, overlap, by)
        return await require_key(connection, found.id), secret

    rotated, secret = writing(store, work)
    _show_secret(
        rotated, secret, by.at, as_json, f"{rotated.id}: the one before works until {when(by.at + overlap)} UTC."
    )


@command.command("revoke")
@click.argument("key")
@store_options
def revoke(key: str, store: str | None, as_json: bool) -> None:
    """Revoke a key permanently."""
    by = myself()

    async def work(connection: AsyncConnection) -> KeyRow:
        from llmops.store.accounts.keys import require_key, revoke_key

        found = await require_key(connection, key)
        await revoke_key(connection, found, by)
        return await require_key(connection, found.id)

    revoked = writing(store, work)
    if as_json:
        print_json(key_data(revoked, by.at))
    else:
        click.echo(f"{revoked.id} of {revoked.email} is revoked; its usage stays on the bill.")


def _spec(was: KeySpec, given: dict[str, Any]) -> KeySpec:
    return replace(
        was,
        name=changed(given["name"], was.name),
        tier=changed(given["tier"], was.tier),
        scopes=changed(given["scopes"], was.scopes),
        models=changed(given["models"], was.models),
        expires_at=changed(given["expires"], was.expires_at),
        limits=changed_limits(was.limits, given),
    )


def _show_secret(key: KeyRow, secret: str, now: datetime, as_json: bool, said: str) -> None:
    if as_json:
        print_json(key_data(key, now) | {"key": secret})
        return
    # the key alone, so that a script can take it
    click.echo(f"{said} The key is shown this once:", err=True)
    click.echo(secret)


def _summary(spec: KeySpec) -> str:
    parts = [f"tier {spec.tier}", limits_text(spec.limits), budget_text(spec.limits), f"for {', '.join(spec.scopes)}"]
    parts += [f"only {', '.join(spec.models)}"] if spec.models else []
    parts += [f"until {when(spec.expires_at)} UTC"] if spec.expires_at else []
    return ", ".join(parts)


def _row(key: KeyRow, now: datetime) -> list[str]:
    spec = key.spec
    state = key.state(now)
    if state == "active" and spec.expires_at:
        state = f"until {spec.expires_at:%Y-%m-%d}"
    models = "all" if spec.models is None else ", ".join(spec.models)
    owner = [key.id, key.tenant_id, key.email, spec.tier]
    limits = [limits_text(spec.limits, short=True), budget_text(spec.limits), state]
    return [*owner, *limits, f"{key.prefix}…", models, spec.name or ""]


def _pairs(key: KeyRow, spent: int | None, now: datetime) -> list[tuple[str, str]]:
    spec = key.spec
    rest = key.previous_until and key.previous_until > now
    pairs = [
        ("key", f"{key.id} ({key.prefix}…)"),
        ("state", key.state(now)),
        ("name", spec.name or ""),
        ("user", f"{key.email} of {key.tenant_id}"),
        ("tier", spec.tier),
        ("scopes", ", ".join(spec.scopes)),
        ("models", "all" if spec.models is None else ", ".join(spec.models)),
        ("limits", limits_text(spec.limits)),
        ("budget", budget_text(spec.limits) + (f", {dollars(spent)} spent" if spent is not None else "")),
        (
            "tenant",
            f"{limits_text(key.tenant_limits)}, {budget_text(key.tenant_limits)} for all keys of {key.tenant_id}",
        ),
        ("made", f"{when(key.created_at)} UTC"),
        ("expires", when(spec.expires_at)),
        ("rotated", f"the one before works until {when(key.previous_until)} UTC" if rest else ""),
    ]
    return [(name, value) for name, value in pairs if value]
