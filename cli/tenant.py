"""`llmops tenant`: who pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.options import changed_limits, limit_options, store_options
from llmops.cli.accounts.store import myself, reading, writing
from llmops.cli.accounts.tables import budget_text, limits_text, print_json, show_pairs, tenant_data, when
from llmops.cli.accounts.tables import show as show_table

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from llmops.store.accounts.tenants import Tenant


@click.group("tenant")
def command() -> None:
    """Tenants: who pays for the keys of their users.

    A tenant's limits hold for all of its keys together, besides each key's own.
    """


@command.command("create")
@click.argument("name")
@limit_options
@store_options
def create(name: str, store: str | None, as_json: bool, **given: Any) -> None:
    """Make a tenant."""
    by = myself()

    async def work(connection: AsyncConnection) -> Tenant:
        from llmops.store.accounts.limits import Limits
        from llmops.store.accounts.tenants import create_tenant

        return await create_tenant(connection, name, changed_limits(Limits(), given), by)

    made = writing(store, work)
    _tell(made, as_json, f"{made.id}: {limits_text(made.limits)}, {budget_text(made.limits)}.")


@command.command("list")
@click.option("--all", "everything", is_flag=True, help="Also deleted ones.")
@store_options
def list_(everything: bool, store: str | None, as_json: bool) -> None:
    """Tenants with their limits."""

    async def work(connection: AsyncConnection) -> Sequence[Tenant]:
        from llmops.store.accounts.tenants import list_tenants

        return await list_tenants(connection, deleted=everything)

    found = reading(store, work)
    if as_json:
        print_json([tenant_data(tenant) for tenant in found])
    elif not found:
        click.echo("No tenants. Make one: llmops tenant create NAME", err=True)
    else:
        show_table(("tenant", "limits", "budget", "made", "deleted"), [_row(tenant) for tenant in found])


@command.command("show")
@click.argument("name")
@store_options
def show(name: str, store: str | None, as_json: bool) -> None:
    """One tenant, and what it may use."""

    async def work(connection: AsyncConnection) -> Tenant:
        from llmops.store.accounts.tenants import require_tenant

        return await require_tenant(connection, name)

    found = reading(store, work)
    if as_json:
        print_json(tenant_data(found))
        return
    limits, budget = limits_text(found.limits), budget_text(found.limits)
    show_pairs(
        [("tenant", found.id), ("limits", limits), ("budget", budget), ("made", f"{when(found.created_at)} UTC")]
    )


@command.command("update")
@click.argument("name")
@limit_options
@store_options
def update(name: str, store: str | None, as_json: bool, **given: Any) -> None:
    """Change the limits that are named; `none` takes one away."""
    if all(value is None for value in given.values()):
        raise click.UsageError("Nothing to change; give an option, e.g. --rpm 120.")
    by = myself()

    async def work(connection: AsyncConnection) -> Tenant:
        from llmops.store.accounts.tenants import require_tenant, update_tenant

        found = await require_tenant(connection, name)
        return await update_tenant(connection, name, changed_limits(found.limits, given), by)

    updated = writing(store, work)
    _tell(updated, as_json, f"{updated.id}: {limits_text(updated.limits)}, {budget_text(updated.limits)}.")


@command.command("delete")
@click.argument("name")
@store_options
def delete(name: str, store: str | None, as_json: bool) -> None:
    """Refuse all of a tenant's keys; its usage stays, and `restore` brings it back."""
    by = myself()

    async def work(connection: AsyncConnection) -> Tenant | None:
        from llmops.store.accounts.tenants import delete_tenant, find_tenant

        await delete_tenant(connection, name, by)
        return await find_tenant(connection, name)

    _tell(writing(store, work), as_json, f"{name} is deleted and its keys are refused; `llmops tenant restore {name}`.")


@command.command("restore")
@click.argument("name")
@store_options
def restore(name: str, store: str | None, as_json: bool) -> None:
    """Bring a deleted tenant back, with its keys."""
    by = myself()

    async def work(connection: AsyncConnection) -> Tenant | None:
        from llmops.store.accounts.tenants import find_tenant, restore_tenant

        await restore_tenant(connection, name, by)
        return await find_tenant(connection, name)

    _tell(writing(store, work), as_json, f"{name} is back, and its keys work again.")


def _tell(tenant: Tenant | None, as_json: bool, said: str) -> None:
    if as_json and tenant:
        print_json(tenant_data(tenant))
    else:
        click.echo(said)


def _row(tenant: Tenant) -> list[str]:
    deleted = when(tenant.deleted_at) if tenant.deleted_at else ""
    return [tenant.id, limits_text(tenant.limits), budget_text(tenant.limits), when(tenant.created_at), deleted]
