"""`llmops tenant`: create, change, delete and restore tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.account_options import admin_options, limit_options
from llmops.cli.accounts.admin_client import AdminClient, or_damaged
from llmops.cli.accounts.param_types import typed_values
from llmops.cli.output import (
    format_budget,
    format_limits,
    format_timestamp,
    print_fields,
    print_json,
    print_result,
    print_results,
)

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
def create(name: str, admin: AdminClient, as_json: bool, **limits: Any) -> None:
    """Create a tenant."""
    from llmops.control.admin.schemas import TenantCreate, TenantRead

    created = admin.request("POST", ("tenants",), TenantRead, body=TenantCreate(id=name, **typed_values(limits)))
    print_result(created, as_json, f"{created.id}: {format_limits(created)}, {format_budget(created)}.")


@command.command("list")
@click.option("--all", "everything", is_flag=True, help="Include deleted tenants.")
@admin_options
def list_(everything: bool, admin: AdminClient, as_json: bool) -> None:
    """List tenants and their limits."""
    from llmops.control.admin.schemas import TenantListQuery, TenantRead

    found = admin.request("GET", ("tenants",), tuple[TenantRead, ...], query=TenantListQuery(all=everything))
    columns = ("tenant", "limits", "budget", "created", "deleted")
    print_results(found, as_json, "No tenants. Make one: llmops tenant create NAME", columns, _row)


@command.command("show")
@click.argument("name")
@admin_options
def show(name: str, admin: AdminClient, as_json: bool) -> None:
    """Show a tenant and its limits."""
    from llmops.control.admin.schemas import TenantRead

    found = admin.request("GET", ("tenants", name), TenantRead)
    if as_json:
        print_json(found.data())
        return
    print_fields(
        [
            ("tenant", found.id),
            ("limits", format_limits(found)),
            ("budget", format_budget(found)),
            ("created", f"{format_timestamp(found.created_at)} UTC"),
        ]
    )


@command.command("update")
@click.argument("name")
@limit_options
@admin_options
def update(name: str, admin: AdminClient, as_json: bool, **limits: Any) -> None:
    """Change the given limits; `none` removes one."""
    from llmops.control.admin.schemas import TenantRead, TenantUpdate

    if not typed_values(limits):
        raise click.UsageError("Nothing to change; give an option, e.g. --rpm 120.")
    updated = admin.request("PATCH", ("tenants", name), TenantRead, body=TenantUpdate(**typed_values(limits)))
    print_result(updated, as_json, f"{updated.id}: {format_limits(updated)}, {format_budget(updated)}.")


@command.command("delete")
@click.argument("name")
@admin_options
def delete(name: str, admin: AdminClient, as_json: bool) -> None:
    """Delete a tenant: its keys stop working, its usage is kept, and `restore` undoes it.

    Its running answers end within 30 seconds.
    """
    from llmops.control.admin.schemas import TenantRead

    deleted = admin.request("DELETE", ("tenants", name), or_damaged(TenantRead))
    print_result(
        deleted, as_json, f"{name} is deleted and its keys are refused; `llmops tenant restore {name}` undoes it."
    )


@command.command("restore")
@click.argument("name")
@admin_options
def restore(name: str, admin: AdminClient, as_json: bool) -> None:
    """Restore a deleted tenant and its keys."""
    from llmops.control.admin.schemas import TenantRead

    restored = admin.request("POST", ("tenants", name, "restore"), TenantRead)
    print_result(restored, as_json, f"{name} is restored, and its keys work again.")


def _row(tenant: TenantRead) -> list[str]:
    deleted = format_timestamp(tenant.deleted_at) if tenant.deleted_at else ""
    return [tenant.id, format_limits(tenant), format_budget(tenant), format_timestamp(tenant.created_at), deleted]
