"""How each operation is done on a store.

What is asked and answered is in `admin/operations.py`; single queries belong to `store/`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import operations as all_of
from llmops.control.admin.handlers import audit, keys, prices, reconcile, tenants, usage
from llmops.store.audit import AuditContext

Handler = Callable[[AsyncConnection, AuditContext, Any], Awaitable[Any]]

HANDLERS: Mapping[str, Handler] = {
    all_of.CREATE_TENANT.name: tenants.create,
    all_of.LIST_TENANTS.name: tenants.list_,
    all_of.SHOW_TENANT.name: tenants.show,
    all_of.UPDATE_TENANT.name: tenants.update,
    all_of.DELETE_TENANT.name: tenants.delete,
    all_of.RESTORE_TENANT.name: tenants.restore,
    all_of.CREATE_KEY.name: keys.create,
    all_of.LIST_KEYS.name: keys.list_,
    all_of.SHOW_KEY.name: keys.show,
    all_of.UPDATE_KEY.name: keys.update,
    all_of.ROTATE_KEY.name: keys.rotate,
    all_of.REVOKE_KEY.name: keys.revoke,
    all_of.SET_PRICE.name: prices.set_,
    all_of.LIST_PRICES.name: prices.list_,
    all_of.READ_USAGE.name: usage.read,
    all_of.RECONCILE.name: reconcile.reconcile,
    all_of.LIST_DEAD_LETTERS.name: usage.list_dead_letters,
    all_of.READ_AUDIT.name: audit.read,
}
