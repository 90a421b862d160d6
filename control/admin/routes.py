"""The routes of the admin API, /api/admin/….

For a local store, the CLI calls these routes in its own process.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response

from llmops.control.admin.reconcile import reconcile
from llmops.control.admin.schemas import (
    AuditEntryRead,
    AuditQuery,
    DamagedRow,
    DateRange,
    DeadLetterListQuery,
    DeadLetterRead,
    KeyCreate,
    KeyDetails,
    KeyListQuery,
    KeyRead,
    KeyRevoke,
    KeyRotate,
    KeyUpdate,
    KeyWithSecret,
    LimitFields,
    PriceCreate,
    PriceListQuery,
    PriceRead,
    Reconciliation,
    ReconciliationRequest,
    SafeText,
    TenantCreate,
    TenantListQuery,
    TenantRead,
    TenantUpdate,
    UsageLine,
    UsageReport,
    UsageReportQuery,
    to_dollars,
    to_micros,
)
from llmops.control.api_route import ControlRoute, add_routes, json_response, list_response, make_router
from llmops.control.store_access import client_errors
from llmops.gateway.errors import ForbiddenError
from llmops.gateway.http.error_handlers import add_exception_handlers
from llmops.gateway.http.request_context import context_of
from llmops.store import audit, dead_letters, prices
from llmops.store.accounts import keys, tenants
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.accounts.users import DEFAULT_TIER, ensure_user, require_user
from llmops.store.audit import AuditContext, AuditLogEntry
from llmops.store.columns import DAMAGED
from llmops.store.database import Store
from llmops.store.dead_letters import ListedLetter
from llmops.store.factory import LazyStore
from llmops.store.tables import SUMMED
from llmops.store.usage_queries import UsageFilter, UsageSum, spent_micros, sum_usage
from llmops.untrusted_text import escape_unsafe

#: Maximum number of characters shown of a usage event that could not be billed. All events of
#: gateways are shorter.
MAX_EVENT_CHARACTERS = 4096

#: Settings that every key has. In an update, null leaves them unchanged instead of removing them.
_REQUIRED_SETTINGS = ("tier", "scopes")
_KEY_SETTINGS = ("name", *_REQUIRED_SETTINGS, "models", "expires_at")


_Store = Store | LazyStore


@dataclass(frozen=True)
class AdminAccess:
    """The store that an application administers, and the check of its callers.

    Attributes:
        store: The store.
        actor: Returns the name of a request's sender for the audit log. Raises ForbiddenError if
            the sender may not administer the store.
    """

    store: _Store
    actor: Callable[[Request], str]


class AdminSession:
    """A request's access to the store.

    Attributes:
        by: The actor and time of the request, for the audit log.
    """

    def __init__(self, store: _Store, actor: str) -> None:
        self._store = store
        self.by = AuditContext(actor, datetime.now(UTC))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection for queries. Errors of the client's input become HTTP errors."""
        async with self._store.read() as connection:
            with client_errors():
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction. Errors of the client's input become HTTP errors."""
        async with self._store.write() as connection:
            with client_errors():
                yield connection


class AdminRoute(ControlRoute):
    """A route that only callers who may administer the store can use."""

    async def authorize(self, request: Request) -> None:
        request.app.state.admin.actor(request)


async def _open_session(request: Request) -> AdminSession:
    access: AdminAccess = request.app.state.admin
    return AdminSession(access.store, access.actor(request))


Session = Annotated[AdminSession, Depends(_open_session)]
TenantId = Annotated[SafeText, Path(description="The tenant's name.")]
KeyId = Annotated[SafeText, Path(description="The key's id, or the SHA-256 of its secret in hex.")]

router = make_router(prefix="/api/admin", tags=["admin"], route_class=AdminRoute)


def add_admin_routes(app: FastAPI, store: _Store, actor: Callable[[Request], str] | None = None) -> None:
    """Add the admin API to an application.

    `actor` identifies the callers. By default, callers need a key with the scope `admin`.
    """
    app.state.admin = AdminAccess(store, actor or _admin_key)
    add_routes(app, router)


def create_local_app(store: _Store, actor: str) -> FastAPI:
    """Return an application that has only the admin API, for the owner of a local store.

    The application raises errors of the store instead of turning them into HTTP errors.
    """
    app = FastAPI()
    add_exception_handlers(app)
    add_admin_routes(app, store, lambda _request: actor)
    return app


def _admin_key(request: Request) -> str:
    """Return the caller's name for the audit log.

    A key is required even if the gateway runs without authentication: otherwise, every page open in
    a browser on this machine could create keys.

    Raises:
        ForbiddenError: The caller has no key with the scope `admin`.
    """
    caller = context_of(request).caller
    if "admin" not in caller.scopes:
        raise ForbiddenError(
            "Administration requires a key with the scope 'admin'. Create one on the store with "
            "`llmops key create --scopes admin`."
        )
    return f"key:{caller.key_id}" if caller.key_id else f"user:{caller.user_id}"


# -- tenants


@router.post("/tenants", status_code=201, summary="Create a tenant")
async def create_tenant(session: Session, body: TenantCreate) -> TenantRead:
    async with session.write() as connection:
        limits = _merge_limits(Limits(), body)
        return _tenant_read(await tenants.create_tenant(connection, body.id, limits, session.by))


@router.get("/tenants", summary="List tenants")
async def list_tenants(session: Session, query: Annotated[TenantListQuery, Query()]) -> tuple[TenantRead, ...]:
    async with session.read() as connection:
        return tuple(map(_tenant_read, await tenants.list_tenants(connection, deleted=query.all)))


@router.get("/tenants/{tenant}", summary="Show a tenant")
async def show_tenant(session: Session, tenant: TenantId) -> TenantRead:
    async with session.read() as connection:
        return _tenant_read(await tenants.require_tenant(connection, tenant))


@router.patch("/tenants/{tenant}", summary="Change the limits of a tenant")
async def update_tenant(session: Session, tenant: TenantId, body: TenantUpdate) -> TenantRead:
    async with session.write() as connection:
        found = await tenants.lock_tenant(connection, tenant)
        limits = _merge_limits(found.limits, body)
        return _tenant_read(await tenants.update_tenant(connection, tenant, limits, session.by))


@router.delete("/tenants/{tenant}", summary="Delete a tenant: its keys are refused, its usage stays")
async def delete_tenant(session: Session, tenant: TenantId) -> TenantRead | DamagedRow:
    async with session.write() as connection:
        await tenants.delete_tenant(connection, tenant, session.by)
        try:
            found = await tenants.find_tenant(connection, tenant)
            assert found is not None
            return _tenant_read(found)
        except DAMAGED:
            return DamagedRow(id=tenant)


@router.post("/tenants/{tenant}/restore", summary="Restore a deleted tenant")
async def restore_tenant(session: Session, tenant: TenantId) -> TenantRead:
    async with session.write() as connection:
        return _tenant_read(await tenants.restore_tenant(connection, tenant, session.by))


def _tenant_read(tenant: tenants.Tenant) -> TenantRead:
    return TenantRead(id=tenant.id, created_at=tenant.created_at, deleted_at=tenant.deleted_at, **tenant.limits.data())


def _merge_limits(limits: Limits, update: LimitFields) -> Limits:
    """Return the limits after an update. Raises InputError for an impossible limit."""
    changes = {name: getattr(update, name) for name in LimitFields.model_fields if name in update.model_fields_set}
    if changes.get("budget") is not None:
        changes["budget"] = Budget(changes["budget"].micros, changes["budget"].period)
    return replace(limits, **changes)


# -- keys


@router.post("/keys", status_code=201, summary="Create a key; its secret is returned only once")
async def create_key(session: Session, body: KeyCreate) -> KeyWithSecret:
    async with session.write() as connection:
        await tenants.require_tenant(connection, body.tenant)
        owner = await ensure_user(connection, body.tenant, body.user, session.by, body.tier or DEFAULT_TIER)
        spec = _merge_spec(keys.KeySpec(tier=owner.tier), body)
        key, secret = await keys.create_key(connection, owner, spec, session.by)
        return KeyWithSecret(**_key_fields(key, session.by.at), key=secret)


@router.get("/keys", summary="List keys without their secrets", response_model=tuple[KeyRead, ...])
async def list_keys(session: Session, query: Annotated[KeyListQuery, Query()]) -> Response:
    now = session.by.at
    async with session.read() as connection:
        if query.tenant:
            await tenants.require_tenant(connection, query.tenant)
        owner = await require_user(connection, query.user) if query.user else None

    async def read(after: keys.KeyRow | None, limit: int) -> Sequence[keys.KeyRow]:
        async with session.read() as connection:
            return await keys.list_keys(connection, query.tenant, owner.id if owner else None, limit, after)

    def show(key: keys.KeyRow) -> KeyRead | None:
        return KeyRead(**_key_fields(key, now)) if query.all or key.state(now) == "active" else None

    return await list_response(read, show)


@router.get("/keys/{key}", summary="Show a key, what is spent of its budget, and its tenant's limits")
async def show_key(session: Session, key: KeyId) -> KeyDetails:
    now = session.by.at
    async with session.read() as connection:
        found = await keys.require_key(connection, key)
        budget = found.spec.limits.budget
        spent = await spent_micros(connection, budget.begins(now), key_id=found.id) if budget else None
    limits = LimitFields(**found.tenant_limits.data())
    return KeyDetails(**_key_fields(found, now), spent_micros=spent, tenant_limits=limits)


@router.patch("/keys/{key}", summary="Change the settings of a key")
async def update_key(session: Session, key: KeyId, body: KeyUpdate) -> KeyRead:
    async with session.write() as connection:
        found = await keys.lock_key(connection, key)
        updated = await keys.update_key(connection, found, _merge_spec(found.spec, body), session.by)
        return KeyRead(**_key_fields(updated, session.by.at))


@router.post("/keys/{key}/rotate", summary="Give a key another secret")
async def rotate_key(session: Session, key: KeyId, body: KeyRotate) -> KeyWithSecret:
    async with session.write() as connection:
        found = await keys.lock_key(connection, key)
        secret = await keys.rotate_key(connection, found, timedelta(seconds=body.overlap_seconds), session.by)
        rotated = await keys.require_key(connection, found.id)
        return KeyWithSecret(**_key_fields(rotated, session.by.at), key=secret)


@router.post("/keys/{key}/revoke", summary="Revoke a key permanently")
async def revoke_key(session: Session, key: KeyId, body: KeyRevoke) -> KeyRead | DamagedRow:
    async with session.write() as connection:
        revoked = await keys.revoke_key(connection, key, session.by, body.now)
        try:
            return KeyRead(**_key_fields(await keys.require_key(connection, revoked), session.by.at))
        except DAMAGED:
            return DamagedRow(id=revoked)


def _merge_spec(spec: keys.KeySpec, update: KeyUpdate) -> keys.KeySpec:
    """Return a key's settings after an update."""
    changes = {name: getattr(update, name) for name in _KEY_SETTINGS if name in update.model_fields_set}
    changes = {name: value for name, value in changes.items() if value is not None or name not in _REQUIRED_SETTINGS}
    return replace(spec, **changes, limits=_merge_limits(spec.limits, update))


def _key_fields(key: keys.KeyRow, now: datetime) -> dict[str, Any]:
    """Return the fields of a `KeyRead` for a key."""
    settings = {name: getattr(key.spec, name) for name in _KEY_SETTINGS}
    times = {name: getattr(key, name) for name in ("created_at", "revoked_at", "previous_until")}
    owner = {"id": key.id, "prefix": key.prefix, "tenant": key.tenant_id, "user": key.email, "state": key.state(now)}
    return owner | settings | times | key.spec.limits.data()


# -- prices


@router.post("/prices", status_code=201, summary="Set the price of a model from a time on")
async def set_price(session: Session, body: PriceCreate) -> PriceRead:
    async with session.write() as connection:
        price = prices.Price(
            model=body.model,
            valid_from=body.valid_from or session.by.at,
            input_micros=to_micros(body.input),
            cached_micros=to_micros(body.input if body.cached is None else body.cached),
            output_micros=to_micros(body.output),
        )
        await prices.set_price(connection, price, session.by)
        return _price_read(price, await prices.prices_at(connection, session.by.at))


@router.get("/prices", summary="List past, present and future prices")
async def list_prices(session: Session, query: Annotated[PriceListQuery, Query()]) -> tuple[PriceRead, ...]:
    async with session.read() as connection:
        in_force = await prices.prices_at(connection, query.at or session.by.at)
        found = [_price_read(price, in_force) for price in await prices.list_prices(connection, query.model)]
    return tuple(price for price in found if price.in_force or not query.at)


def _price_read(price: prices.Price, in_force: Mapping[str, prices.Price]) -> PriceRead:
    return PriceRead(
        id=price.id,
        model=price.model,
        valid_from=price.valid_from,
        input=to_dollars(price.input_micros),
        cached=to_dollars(price.cached_micros),
        output=to_dollars(price.output_micros),
        in_force=in_force.get(price.model) == price,
    )


# -- usage and the audit log


@router.get("/usage", summary="Report usage and its cost", response_model=UsageReport)
async def read_usage(session: Session, query: Annotated[UsageReportQuery, Query()]) -> Response:
    async with session.read() as connection:
        period = DateRange.resolve(query.first, query.last, session.by.at)
        if query.tenant and await tenants.find_tenant(connection, query.tenant) is None:
            # check that the tenant exists, even a deleted one; the error suggests a similar name
            await tenants.require_tenant(connection, query.tenant)
        usage_filter = UsageFilter(
            tenant_id=query.tenant,
            user_id=(await require_user(connection, query.user)).id if query.user else None,
            key_id=(await keys.require_key(connection, query.key)).id if query.key else None,
            model=query.model,
            first=period.first,
            last=period.last,
        )
        total, sums = await read_sums(connection, usage_filter, query.by)
    return await json_response(lambda: UsageReport(period=period, **report_fields(total, sums)), exclude_unset=True)


@router.post("/usage/reconcile", summary="Compare the ledger with gateways and engines")
async def reconcile_usage(session: Session, body: ReconciliationRequest) -> Reconciliation:
    async with session.write() as connection:
        return await reconcile(connection, session.by, body)


@router.get(
    "/usage/dead-letters",
    summary="List usage events that could not be billed",
    response_model=tuple[DeadLetterRead, ...],
)
async def list_dead_letters(session: Session, query: Annotated[DeadLetterListQuery, Query()]) -> Response:
    async def read(after: ListedLetter | None, limit: int) -> Sequence[ListedLetter]:
        async with session.read() as connection:
            return await dead_letters.list_dead_letters(connection, limit, after)

    return await list_response(read, _dead_letter_read, query.limit)


def _dead_letter_read(listed: ListedLetter) -> DeadLetterRead:
    letter = listed.letter
    return DeadLetterRead(
        reason=letter.reason,
        source=escape_unsafe(letter.source),
        signed=letter.event_id is not None,
        count=listed.arrivals,
        last_at=listed.last_at,
        value=escape_unsafe(letter.value.decode("utf-8", "replace"), MAX_EVENT_CHARACTERS),
    )


@router.get(
    "/audit", summary="List administrative changes and rejected requests", response_model=tuple[AuditEntryRead, ...]
)
async def read_audit(session: Session, query: Annotated[AuditQuery, Query()]) -> Response:
    async def read(after: AuditLogEntry | None, limit: int) -> Sequence[AuditLogEntry]:
        async with session.read() as connection:
            return await audit.list_audit_entries(
                connection,
                tenant_id=query.tenant,
                since=query.since,
                limit=limit,
                action=query.action or "",
                changes_only=query.changes_only,
                after=after,
            )

    return await list_response(read, audit_entry_read, query.limit)


def audit_entry_read(entry: AuditLogEntry) -> AuditEntryRead:
    """Return an entry of the audit log in the form of the API."""
    return AuditEntryRead.model_validate(entry, from_attributes=True)


async def read_sums(
    connection: AsyncConnection, usage_filter: UsageFilter, by: Sequence[str]
) -> tuple[UsageSum, Sequence[UsageSum]]:
    """Return the total usage, and the sums of each group of `by`."""
    groups = tuple(dict.fromkeys(by))
    (total,) = await sum_usage(connection, usage_filter)
    return total, await sum_usage(connection, usage_filter, groups) if groups else ()


def report_fields(total: UsageSum, sums: Sequence[UsageSum]) -> dict[str, Any]:
    """Return the fields of a `UsageReport` except the period."""
    return {**_totals(total), "lines": tuple(map(_usage_line, sums))}


def _totals(usage: UsageSum) -> dict[str, Any]:
    return {name: getattr(usage, name) for name in SUMMED} | {"cost_usd": usage.cost_micros / 1e6}


def _usage_line(usage: UsageSum) -> UsageLine:
    # usage of a user who is not in the store is billed too
    groups: dict[str, Any] = {name: "unknown" if value is None else str(value) for name, value in usage.group.items()}
    return UsageLine(**_totals(usage), **groups)
