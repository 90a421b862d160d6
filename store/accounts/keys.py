"""API keys: their settings, and the look-up of a request's key."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, String, bindparam, case, func, literal, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import InputError, UnknownResourceError
from llmops.store.accounts.key_secrets import (
    VISIBLE_PREFIX_LENGTH,
    hash_secret,
    is_hash,
    is_secret,
    new_key_id,
    new_secret,
)
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.users import DEFAULT_TIER, User, check_tier
from llmops.store.audit import AuditContext, record_action
from llmops.store.columns import UtcDateTime
from llmops.store.damaged_rows import name_damaged, read_undamaged
from llmops.store.tables import api_keys, tenants, users

SCOPES = ("inference", "usage", "metrics", "admin", "fairness")
DEFAULT_SCOPES = ("inference",)


@dataclass(frozen=True)
class KeySpec:
    """The settings of a key. `models` is None if the key may use all models."""

    name: str | None = None
    tier: str = DEFAULT_TIER
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    models: tuple[str, ...] | None = None
    limits: Limits = field(default_factory=Limits)
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        unknown = [scope for scope in self.scopes if scope not in SCOPES]
        if unknown or not self.scopes:
            raise InputError(f"{_named('scope', unknown)}; a key has one or more of {', '.join(SCOPES)}.")
        check_tier(self.tier)
        if self.name is not None and not 0 < len(self.name) <= 100:
            raise InputError(f"A key's name has 1 to 100 characters, not {len(self.name)}; give another name.")
        if self.models is not None and not all(isinstance(model, str) and model for model in self.models):
            raise InputError("A model's name cannot be empty; leave the list of models out to allow all models.")

    def columns(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tier": self.tier,
            "scopes": list(self.scopes),
            "models": None if self.models is None else list(self.models),
            "expires_at": self.expires_at,
            **self.limits.columns(),
        }


@dataclass(frozen=True)
class KeyRow:
    """A key, with its user, its tenant and all else that a request with the key needs.

    `previous_until` is the end of the previous secret, before the last rotation. `secret_until` is
    the end of the secret with which the key was looked up, or None for the newest secret.
    """

    id: str
    prefix: str
    spec: KeySpec
    user_id: str
    email: str
    tenant_id: str
    tenant_limits: Limits
    created_at: datetime
    revoked_at: datetime | None
    tenant_deleted_at: datetime | None
    previous_until: datetime | None
    secret_until: datetime | None = None

    def state(self, now: datetime) -> str:
        """Return `active`, or the reason why requests with the key are rejected.

        The reasons are `revoked`, `tenant deleted`, `expired` and `rotated`.
        """
        if self.revoked_at is not None:
            return "revoked"
        if self.tenant_deleted_at is not None:
            return "tenant deleted"
        if self.spec.expires_at is not None and self.spec.expires_at <= now:
            return "expired"
        if self.secret_until is not None and self.secret_until <= now:
            return "rotated"
        return "active"

    def ends_answers(self, now: datetime) -> bool:
        """Return True if running answers of the key, begun with this secret, must end.

        Such a key has a deleted tenant, or was revoked with `now`, or its secret was replaced and
        is no longer valid.
        """
        expires = self.spec.expires_at
        revoked = self.revoked_at is not None and expires is not None and expires <= self.revoked_at
        replaced = self.secret_until is not None and self.secret_until <= now
        return revoked or replaced or self.tenant_deleted_at is not None


_KEYS = (
    select(
        api_keys,
        users.c.email,
        users.c.tenant_id,
        tenants.c.deleted_at.label("tenant_deleted_at"),
        *(tenants.c[name].label(f"tenant_{name}") for name in Limits().columns()),
    )
    .join(users, users.c.id == api_keys.c.user_id)
    .join(tenants)
)
_ORDER = (users.c.tenant_id, users.c.email, api_keys.c.created_at, api_keys.c.id)

_HASHED = bindparam("hashed", type_=String)
# composed once, because composing the statement takes as long as running it
_BY_HASH = _KEYS.add_columns(
    case((api_keys.c.previous_hash == _HASHED, api_keys.c.previous_until)).label("secret_until")
).where(or_(api_keys.c.hash == _HASHED, api_keys.c.previous_hash == _HASHED))

_HASHES = bindparam("hashes", expanding=True, type_=String)
_BY_HASHES = _KEYS.where(or_(api_keys.c.hash.in_(_HASHES), api_keys.c.previous_hash.in_(_HASHES)))


async def create_key(connection: AsyncConnection, user: User, spec: KeySpec, by: AuditContext) -> tuple[KeyRow, str]:
    """Create a key. Return the key and its secret, which is not stored.

    Raises:
        InputError: The expiry is in the past.
    """
    _require_future_expiry(spec, by)
    secret, key_id = new_secret(), new_key_id()
    await connection.execute(
        api_keys.insert().values(
            id=key_id,
            hash=hash_secret(secret),
            prefix=secret[:VISIBLE_PREFIX_LENGTH],
            user_id=user.id,
            created_at=by.at,
            **spec.columns(),
        )
    )
    await _note_newest(connection, user.id, hash_secret(secret))
    await record_action(connection, by, "key.create", key_id, user.tenant_id, _detail(spec) | {"user": user.email})
    return await require_key(connection, key_id), secret


async def find_key(connection: AsyncConnection, hashed: str) -> KeyRow | None:
    """Return the key with this SHA-256 in one query, or None.

    Check the key's `state` before use: keys that are revoked or expired are returned too.
    """
    row = (await connection.execute(_BY_HASH, {"hashed": hashed})).mappings().first()
    return None if row is None else _key(row)


async def find_keys(connection: AsyncConnection, hashes: Sequence[str]) -> dict[str, KeyRow]:
    """Return the keys with these hashes, in one query.

    A rotated key can be found by both of its secrets.
    """
    found: dict[str, KeyRow] = {}
    for row in (await connection.execute(_BY_HASHES, {"hashes": list(hashes)})).mappings():
        key = _key(row)
        found[row["hash"]] = key
        if row["previous_hash"] is not None:
            found[row["previous_hash"]] = replace(key, secret_until=key.previous_until)
    return {hashed: found[hashed] for hashed in hashes if hashed in found}


async def is_withdrawn(connection: AsyncConnection, hashed: str) -> bool:
    """Return True if the key with this SHA-256 is revoked or its tenant deleted, even if a row is damaged."""
    statement = select(api_keys.c.id).join(users, users.c.id == api_keys.c.user_id).join(tenants)
    withdrawn = or_(api_keys.c.revoked_at.is_not(None), tenants.c.deleted_at.is_not(None))
    return (await connection.execute(statement.where(_is_named(hashed), withdrawn))).first() is not None


async def has_any_key(connection: AsyncConnection) -> bool:
    """Return True if a key was ever created in this store."""
    return (await connection.execute(select(api_keys.c.id).limit(1))).first() is not None


async def require_key(connection: AsyncConnection, key: str) -> KeyRow:
    """Return a key by its id, its SHA-256 or its secret.

    Raises:
        UnknownResourceError: No such key exists.
        InputError: A value of its row, or of its tenant's, is damaged.
    """
    with name_damaged("key", _shown(key)):
        if is_secret(key) or is_hash(key):
            found = await find_key(connection, key if is_hash(key) else hash_secret(key))
        else:
            row = (await connection.execute(_KEYS.where(_is_named(key)))).mappings().first()
            found = None if row is None else _key(row)
    if found is None:
        raise _unknown(key)
    return found


async def lock_key(connection: AsyncConnection, key: str) -> KeyRow:
    """Return a key as `require_key` does, and lock it until the transaction ends.

    Without the lock, the later of two simultaneous changes would undo the earlier change.
    """
    found = await require_key(connection, key)
    await connection.execute(select(api_keys.c.id).where(api_keys.c.id == found.id).with_for_update(key_share=True))
    return await require_key(connection, found.id)


async def list_keys(
    connection: AsyncConnection,
    tenant_id: str | None = None,
    user_id: str | None = None,
    limit: int = 500,
    after: KeyRow | None = None,
) -> Sequence[KeyRow]:
    """Return keys in the order of tenant, user and age, including revoked and expired keys.

    A key with a damaged value, or of a damaged tenant, is left out and logged.

    Args:
        connection: A connection to the store.
        tenant_id: Only keys of this tenant.
        user_id: Only keys of this user.
        limit: Maximum number of keys.
        after: The last key of the previous page, or None for the first page.
    """
    statement = _KEYS.order_by(*_ORDER)
    if after is not None:
        statement = statement.where(tuple_(*_ORDER) > (after.tenant_id, after.email, after.created_at, after.id))
    if tenant_id is not None:
        statement = statement.where(users.c.tenant_id == tenant_id)
    if user_id is not None:
        statement = statement.where(users.c.id == user_id)
    return await read_undamaged(connection, statement, _key, "key", api_keys.c.id, limit)


async def update_key(connection: AsyncConnection, key: KeyRow, spec: KeySpec, by: AuditContext) -> KeyRow:
    """Change the settings of a key.

    Raises:
        InputError: The key is revoked, or the new expiry is in the past.
    """
    _require_not_revoked(key)
    if spec.expires_at != key.spec.expires_at:
        _require_future_expiry(spec, by)
    await connection.execute(api_keys.update().where(api_keys.c.id == key.id).values(**spec.columns()))
    was, new = _detail(key.spec), _detail(spec)
    changed = {name: new[name] for name in new if new[name] != was[name]}
    await record_action(connection, by, "key.update", key.id, key.tenant_id, changed)
    return replace(key, spec=spec)


async def revoke_key(connection: AsyncConnection, key: str, by: AuditContext, now: bool = False) -> str:
    """Revoke a key, named as for `require_key`, with all its secrets, permanently. Return its id.

    The values of its row are not read, because the key of a damaged row must be revocable.
    With `now`, answers that are being generated for the key end too: its expiry is set to the
    revocation, which `KeyRow.ends_answers` looks for.

    Raises:
        UnknownResourceError: No such key exists.
        InputError: The key is already revoked and `now` is False.
    """
    statement = select(api_keys.c.id, api_keys.c.hash, users.c.tenant_id).join(users, users.c.id == api_keys.c.user_id)
    found = (await connection.execute(statement.where(_is_named(key)))).first()
    if found is None:
        raise _unknown(key)
    revoked_at = func.coalesce(api_keys.c.revoked_at, literal(by.at, UtcDateTime))
    ends = {"expires_at": revoked_at} if now else {}
    change = api_keys.update().where(api_keys.c.id == found.id).values(revoked_at=revoked_at, **ends)
    if not (await connection.execute(change if now else change.where(api_keys.c.revoked_at.is_(None)))).rowcount:
        raise _revoked(found.id)
    await connection.execute(users.update().where(users.c.api_key_hash == found.hash).values(api_key_hash=None))
    await record_action(connection, by, "key.revoke", found.id, found.tenant_id, {"now": True} if now else None)
    return str(found.id)


async def rotate_key(connection: AsyncConnection, key: KeyRow, overlap: timedelta, by: AuditContext) -> str:
    """Give a key a new secret and return the secret.

    The previous secret stays valid for `overlap`; older secrets become invalid at once. Running
    answers of a secret end when it becomes invalid.

    Raises:
        InputError: The key is revoked.
    """
    _require_not_revoked(key)
    secret = new_secret()
    await connection.execute(
        api_keys.update()
        .where(api_keys.c.id == key.id)
        .values(
            hash=hash_secret(secret),
            prefix=secret[:VISIBLE_PREFIX_LENGTH],
            previous_hash=api_keys.c.hash,
            previous_until=by.at + overlap,
        )
    )
    await _note_newest(connection, key.user_id, hash_secret(secret))
    await record_action(
        connection, by, "key.rotate", key.id, key.tenant_id, {"previous_until": (by.at + overlap).isoformat()}
    )
    return secret


def _key(row: RowMapping) -> KeyRow:
    return KeyRow(
        spec=KeySpec(
            name=row["name"],
            tier=row["tier"],
            scopes=tuple(row["scopes"]),
            models=None if row["models"] is None else tuple(row["models"]),
            limits=Limits.from_row(row),
            expires_at=row["expires_at"],
        ),
        tenant_limits=Limits.from_row(row, "tenant_"),
        secret_until=row.get("secret_until"),
        **{name: row[name] for name in _SAME},
    )


_SAME = (
    "id", "prefix", "user_id", "email", "tenant_id", "created_at", "revoked_at", "tenant_deleted_at", "previous_until",
)  # fmt: skip


async def _note_newest(connection: AsyncConnection, user_id: str, hashed: str) -> None:
    await connection.execute(users.update().where(users.c.id == user_id).values(api_key_hash=hashed))


def _require_future_expiry(spec: KeySpec, by: AuditContext) -> None:
    if spec.expires_at is not None and spec.expires_at <= by.at:
        raise InputError(
            f"A key cannot expire in the past ({spec.expires_at:%Y-%m-%d %H:%M} UTC); give a later time, or never."
        )


def _require_not_revoked(key: KeyRow) -> None:
    if key.revoked_at is not None:
        raise _revoked(key.id)


def _revoked(key_id: str) -> InputError:
    return InputError(f"The key {key_id} was revoked; `llmops key create` makes another.")


def _unknown(key: str) -> UnknownResourceError:
    return UnknownResourceError(f"There is no key {_shown(key)}; `llmops key list --all` shows all keys.")


def _shown(key: str) -> str:
    # a mistyped secret is close to the real secret, so the message shows only its beginning
    return f"{key[:VISIBLE_PREFIX_LENGTH]}…" if key.startswith("sk-") else "of this secret" if is_hash(key) else key


def _is_named(key: str) -> ColumnElement[bool]:
    """Return the condition for the key with this id, SHA-256 or secret."""
    if not is_secret(key) and not is_hash(key):
        return api_keys.c.id == key
    hashed = key if is_hash(key) else hash_secret(key)
    return or_(api_keys.c.hash == hashed, api_keys.c.previous_hash == hashed)


def _detail(spec: KeySpec) -> dict[str, Any]:
    """Return the settings of a key in the form of the audit log."""
    columns = spec.columns()
    return columns | {"expires_at": spec.expires_at.isoformat() if spec.expires_at else None}


def _named(what: str, unknown: Sequence[str]) -> str:
    return f"There is no {what} {', '.join(unknown)}" if unknown else f"There is no {what}"
