"""`llmops tenant`: who pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.account_options import admin_options, limit_options
from llmops.cli.accounts.admin_backend import AdminBackend
from llmops.cli.accounts.output import format_budget, format_limits, format_timestamp, print_fields, print_json
from llmops.cli.accounts.output import print_table as show_table
from llmops.cli.accounts.param_types import typed_values

if TYPE_CHECKING:
    from llmops.control.admin.schemas import TenantRead


@click.group("tenant")
def command() -> None:
    """Manage tenants: who pays for the keys of their users.

    A tenant's limits apply to all of its keys together, in addition to each key's own.
    """


@command.command("create")
@click.argument("name")
@limit_options
@admin_options
def create(name: str, at: AdminBackend, as_json: bool, **given: Any) -> None:
    """Create a tenant."""
    from llmops.control.admin.operations import CREATE_TENANT
    from llmops.control.admin.schemas import TenantCreate

    made = at.do(CREATE_TENANT, TenantCreate(id=name, **typed_values(given)))
    _print_tenant(made, as_json, f"{made.id}: {format_limits(made)}, {format_budget(made)}.")


@command.command("list")
@click.option("--all", "everything", is_flag=True, help="Include deleted tenants.")
@admin_options
def list_(everything: bool, at: AdminBackend, as_json: bool) -> None:
    """List tenants and their limits."""
    from llmops.control.admin.operations import LIST_TENANTS
    from llmops.control.admin.schemas import TenantListQuery

    found = at.do(LIST_TENANTS, TenantListQuery(all=everything))
    if as_json:
        print_json([tenant.data() for tenant in found])
    elif not found:
        click.echo("No tenants. Make one: llmops tenant create NAME", err=True)
    else:
        show_table(("tenant", "limits", "budget", "made", "deleted"), [_row(tenant) for tenant in found])


@command.command("show")
@click.argument("name")
@admin_options
def show(name: str, at: AdminBackend, as_json: bool) -> None:
    """Show a tenant and its limits."""
    from llmops.control.admin.operations import SHOW_TENANT
    from llmops.control.admin.schemas import TenantReference

    found = at.do(SHOW_TENANT, TenantReference(tenant=name))
    if as_json:
        print_json(found.data())
        return
    limits, budget = format_limits(found), format_budget(found)
    print_fields(
        [
            ("tenant", found.id),
            ("limits", limits),
            ("budget", budget),
            ("made", f"{format_timestamp(found.created_at)} UTC"),
        ]
    )


@command.command("update")
@click.argument("name")
@limit_options
@admin_options
def update(name: str, at: AdminBackend, as_json: bool, **given: Any) -> None:
    """Change the given limits; `none` removes one."""
    from llmops.control.admin.operations import UPDATE_TENANT
    from llmops.control.admin.schemas import TenantUpdate

    if not typed_values(given):
        raise click.UsageError("Nothing to change; give an option, e.g. --rpm 120.")
    updated = at.do(UPDATE_TENANT, TenantUpdate(tenant=name, **typed_values(given)))
    _print_tenant(updated, as_json, f"{updated.id}: {format_limits(updated)}, {format_budget(updated)}.")


@command.command("delete")
@click.argument("name")
@admin_options
def delete(name: str, at: AdminBackend, as_json: bool) -> None:
    """Delete a tenant: its keys stop working, its usage is kept, and `restore` undoes it."""
    from llmops.control.admin.operations import DELETE_TENANT
    from llmops.control.admin.schemas import TenantReference

    deleted = at.do(DELETE_TENANT, TenantReference(tenant=name))
    _print_tenant(
        deleted, as_json, f"{name} is deleted and its keys are refused; `llmops tenant restore {name}` undoes it."
    )


@command.command("restore")
@click.argument("name")
@admin_options
def restore(name: str, at: AdminBackend, as_json: bool) -> None:
    """Restore a deleted tenant and its keys."""
    from llmops.control.admin.operations import RESTORE_TENANT
    from llmops.control.admin.schemas import TenantReference

    _print_tenant(
        at.do(RESTORE_TENANT, TenantReference(tenant=name)), as_json, f"{name} is restored, and its keys work again."
    )


def _print_tenant(tenant: TenantRead, as_json: bool, said: str) -> None:
    if as_json:
        print_json(tenant.data())
    else:
        click.echo(said)


def _row(tenant: TenantRead) -> list[str]:
    deleted = format_timestamp(tenant.deleted_at) if tenant.deleted_at else ""
    return [tenant.id, format_limits(tenant), format_budget(tenant), format_timestamp(tenant.created_at), deleted]
