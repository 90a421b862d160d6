"""`llmops tenant`: who pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.administration import Administration
from llmops.cli.accounts.options import admin_options, limit_options
from llmops.cli.accounts.tables import budget_text, limits_text, print_json, show_pairs, when
from llmops.cli.accounts.tables import show as show_table
from llmops.cli.accounts.types import given_of

if TYPE_CHECKING:
    from llmops.control.admin.wire import Tenant


@click.group("tenant")
def command() -> None:
    """Manage tenants: who pays for the keys of their users.

    A tenant's limits apply to all of its keys together, in addition to each key's own.
    """


@command.command("create")
@click.argument("name")
@limit_options
@admin_options
def create(name: str, at: Administration, as_json: bool, **given: Any) -> None:
    """Create a tenant."""
    from llmops.control.admin.operations import CREATE_TENANT
    from llmops.control.admin.wire import NewTenant

    made = at.do(CREATE_TENANT, NewTenant(id=name, **given_of(given)))
    _tell(made, as_json, f"{made.id}: {limits_text(made)}, {budget_text(made)}.")


@command.command("list")
@click.option("--all", "everything", is_flag=True, help="Include deleted tenants.")
@admin_options
def list_(everything: bool, at: Administration, as_json: bool) -> None:
    """List tenants and their limits."""
    from llmops.control.admin.operations import LIST_TENANTS
    from llmops.control.admin.wire import TenantsWanted

    found = at.do(LIST_TENANTS, TenantsWanted(all=everything))
    if as_json:
        print_json([tenant.data() for tenant in found])
    elif not found:
        click.echo("No tenants. Make one: llmops tenant create NAME", err=True)
    else:
        show_table(("tenant", "limits", "budget", "made", "deleted"), [_row(tenant) for tenant in found])


@command.command("show")
@click.argument("name")
@admin_options
def show(name: str, at: Administration, as_json: bool) -> None:
    """Show a tenant and its limits."""
    from llmops.control.admin.operations import SHOW_TENANT
    from llmops.control.admin.wire import TenantName

    found = at.do(SHOW_TENANT, TenantName(tenant=name))
    if as_json:
        print_json(found.data())
        return
    limits, budget = limits_text(found), budget_text(found)
    show_pairs(
        [("tenant", found.id), ("limits", limits), ("budget", budget), ("made", f"{when(found.created_at)} UTC")]
    )


@command.command("update")
@click.argument("name")
@limit_options
@admin_options
def update(name: str, at: Administration, as_json: bool, **given: Any) -> None:
    """Change the given limits; `none` removes one."""
    from llmops.control.admin.operations import UPDATE_TENANT
    from llmops.control.admin.wire import TenantChange

    if not given_of(given):
        raise click.UsageError("Nothing to change; give an option, e.g. --rpm 120.")
    updated = at.do(UPDATE_TENANT, TenantChange(tenant=name, **given_of(given)))
    _tell(updated, as_json, f"{updated.id}: {limits_text(updated)}, {budget_text(updated)}.")


@command.command("delete")
@click.argument("name")
@admin_options
def delete(name: str, at: Administration, as_json: bool) -> None:
    """Delete a tenant: its keys stop working, its usage is kept, and `restore` undoes it."""
    from llmops.control.admin.operations import DELETE_TENANT
    from llmops.control.admin.wire import TenantName

    deleted = at.do(DELETE_TENANT, TenantName(tenant=name))
    _tell(deleted, as_json, f"{name} is deleted and its keys are refused; `llmops tenant restore {name}` undoes it.")


@command.command("restore")
@click.argument("name")
@admin_options
def restore(name: str, at: Administration, as_json: bool) -> None:
    """Restore a deleted tenant and its keys."""
    from llmops.control.admin.operations import RESTORE_TENANT
    from llmops.control.admin.wire import TenantName

    _tell(at.do(RESTORE_TENANT, TenantName(tenant=name)), as_json, f"{name} is restored, and its keys work again.")


def _tell(tenant: Tenant, as_json: bool, said: str) -> None:
    if as_json:
        print_json(tenant.data())
    else:
        click.echo(said)


def _row(tenant: Tenant) -> list[str]:
    deleted = when(tenant.deleted_at) if tenant.deleted_at else ""
    return [tenant.id, limits_text(tenant), budget_text(tenant), when(tenant.created_at), deleted]
