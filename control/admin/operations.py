"""What an administrator can do: each operation as the admin API has it, its question and its answer.

How it is done is in `work/`. Nothing here needs a database's libraries, so that the CLI can ask another machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from llmops.control.admin import schemas

RequestT = TypeVar("RequestT", bound=schemas.AdminSchema)
ResponseT = TypeVar("ResponseT")
PREFIX = "/api/admin"


@dataclass(frozen=True)
class Operation(Generic[RequestT, ResponseT]):
    """`told`: a Wire, or a tuple of them. Fields of `asked` that are in the path go there, others into the query of a
    GET or DELETE, or the body."""

    name: str
    method: str
    path: str
    asked: type[RequestT]
    told: type[ResponseT]
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

    def answer(self) -> TypeAdapter[ResponseT]:
        return TypeAdapter(self.told)


def _register(
    name: str, method: str, path: str, asked: type[RequestT], told: type[ResponseT], said: str
) -> Operation[RequestT, ResponseT]:
    operation = Operation(name, method, PREFIX + path, asked, told, said)
    OPERATIONS.append(operation)
    return operation


OPERATIONS: list[Operation[Any, Any]] = []

TENANT = schemas.TenantRead
CREATE_TENANT = _register("create_tenant", "POST", "/tenants", schemas.TenantCreate, TENANT, "Make a tenant")
LIST_TENANTS = _register(
    "list_tenants", "GET", "/tenants", schemas.TenantListQuery, tuple[schemas.TenantRead, ...], "Tenants"
)
SHOW_TENANT = _register("show_tenant", "GET", "/tenants/{tenant}", schemas.TenantReference, TENANT, "One tenant")
UPDATE_TENANT = _register(
    "update_tenant", "PATCH", "/tenants/{tenant}", schemas.TenantUpdate, TENANT, "Change its limits"
)
DELETE_TENANT = _register(
    "delete_tenant", "DELETE", "/tenants/{tenant}", schemas.TenantReference, TENANT, "Refuse all of its keys"
)
RESTORE_TENANT = _register(
    "restore_tenant", "POST", "/tenants/{tenant}/restore", schemas.TenantReference, TENANT, "Undo the deletion"
)

CREATE_KEY = _register(
    "create_key", "POST", "/keys", schemas.KeyCreate, schemas.KeyWithSecret, "Make a key; it is told this once"
)
LIST_KEYS = _register(
    "list_keys", "GET", "/keys", schemas.KeyListQuery, tuple[schemas.KeyRead, ...], "Keys, never the keys themselves"
)
SHOW_KEY = _register(
    "show_key",
    "GET",
    "/keys/{key}",
    schemas.KeyReference,
    schemas.KeyDetails,
    "One key, and what is spent of its budget",
)
UPDATE_KEY = _register("update_key", "PATCH", "/keys/{key}", schemas.KeyUpdate, schemas.KeyRead, "Change what is named")
ROTATE_KEY = _register(
    "rotate_key", "POST", "/keys/{key}/rotate", schemas.KeyRotate, schemas.KeyWithSecret, "Another secret for the key"
)
REVOKE_KEY = _register(
    "revoke_key", "POST", "/keys/{key}/revoke", schemas.KeyRevoke, schemas.KeyRead, "Refuse it permanently"
)

SET_PRICE = _register(
    "set_price", "POST", "/prices", schemas.PriceCreate, schemas.PriceRead, "The price of a model, from when on"
)
LIST_PRICES = _register(
    "list_prices", "GET", "/prices", schemas.PriceListQuery, tuple[schemas.PriceRead, ...], "Prices, old and to come"
)

READ_USAGE = _register(
    "read_usage", "GET", "/usage", schemas.UsageReportQuery, schemas.UsageReport, "What was used, and what it cost"
)
RECONCILE = _register(
    "reconcile_usage",
    "POST",
    "/usage/reconcile",
    schemas.ReconciliationRequest,
    schemas.Reconciliation,
    "What has not arrived",
)
LIST_DEAD_LETTERS = _register(
    "list_dead_letters",
    "GET",
    "/usage/dead-letters",
    schemas.DeadLetterListQuery,
    tuple[schemas.DeadLetterRead, ...],
    "Events of usage that are on no bill",
)
READ_AUDIT = _register(
    "read_audit",
    "GET",
    "/audit",
    schemas.AuditQuery,
    tuple[schemas.AuditEntryRead, ...],
    "Who changed what, and who was refused",
)
