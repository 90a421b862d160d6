"""What an administrator can do: each operation as the admin API has it, its question and its answer.

How it is done is in `work/`. Nothing here needs a database's libraries, so that the CLI can ask another machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from llmops.control.admin import wire

Asked = TypeVar("Asked", bound=wire.Wire)
Told = TypeVar("Told")
PREFIX = "/api/admin"


@dataclass(frozen=True)
class Operation(Generic[Asked, Told]):
    """`told`: a Wire, or a tuple of them. Fields of `asked` that are in the path go there, others into the query of a
    GET or DELETE, or the body."""

    name: str
    method: str
    path: str
    asked: type[Asked]
    told: type[Told]
    summary: str
    placed: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placed", tuple(re.findall(r"{(\w+)}", self.path)))

    @property
    def writes(self) -> bool:
        return self.method != "GET"

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PATCH") and set(self.asked.model_fields) > set(self.placed)

    def answer(self) -> TypeAdapter[Told]:
        return TypeAdapter(self.told)


def _of(name: str, method: str, path: str, asked: type[Asked], told: type[Told], said: str) -> Operation[Asked, Told]:
    operation = Operation(name, method, PREFIX + path, asked, told, said)
    OPERATIONS.append(operation)
    return operation


OPERATIONS: list[Operation[Any, Any]] = []

TENANT = wire.Tenant
CREATE_TENANT = _of("create_tenant", "POST", "/tenants", wire.NewTenant, TENANT, "Make a tenant")
LIST_TENANTS = _of("list_tenants", "GET", "/tenants", wire.TenantsWanted, tuple[wire.Tenant, ...], "Tenants")
SHOW_TENANT = _of("show_tenant", "GET", "/tenants/{tenant}", wire.TenantName, TENANT, "One tenant")
UPDATE_TENANT = _of("update_tenant", "PATCH", "/tenants/{tenant}", wire.TenantChange, TENANT, "Change its limits")
DELETE_TENANT = _of("delete_tenant", "DELETE", "/tenants/{tenant}", wire.TenantName, TENANT, "Refuse all of its keys")
RESTORE_TENANT = _of(
    "restore_tenant", "POST", "/tenants/{tenant}/restore", wire.TenantName, TENANT, "Undo the deletion"
)

CREATE_KEY = _of("create_key", "POST", "/keys", wire.NewKey, wire.MadeKey, "Make a key; it is told this once")
LIST_KEYS = _of("list_keys", "GET", "/keys", wire.KeysWanted, tuple[wire.Key, ...], "Keys, never the keys themselves")
SHOW_KEY = _of(
    "show_key", "GET", "/keys/{key}", wire.KeyName, wire.ShownKey, "One key, and what is spent of its budget"
)
UPDATE_KEY = _of("update_key", "PATCH", "/keys/{key}", wire.KeyChange, wire.Key, "Change what is named")
ROTATE_KEY = _of("rotate_key", "POST", "/keys/{key}/rotate", wire.Rotation, wire.MadeKey, "Another secret for the key")
REVOKE_KEY = _of("revoke_key", "POST", "/keys/{key}/revoke", wire.Revocation, wire.Key, "Refuse it permanently")

SET_PRICE = _of("set_price", "POST", "/prices", wire.NewPrice, wire.Price, "The price of a model, from when on")
LIST_PRICES = _of("list_prices", "GET", "/prices", wire.PricesWanted, tuple[wire.Price, ...], "Prices, old and to come")

READ_USAGE = _of("read_usage", "GET", "/usage", wire.UsageWanted, wire.Usage, "What was used, and what it cost")
RECONCILE = _of(
    "reconcile_usage",
    "POST",
    "/usage/reconcile",
    wire.ReconciliationWanted,
    wire.Reconciliation,
    "What has not arrived",
)
LIST_PARKED = _of(
    "list_parked_events",
    "GET",
    "/usage/parked",
    wire.ParkedWanted,
    tuple[wire.ParkedEvent, ...],
    "Events of usage that are on no bill",
)
READ_AUDIT = _of(
    "read_audit",
    "GET",
    "/audit",
    wire.AuditWanted,
    tuple[wire.AuditEntry, ...],
    "Who changed what, and who was refused",
)
