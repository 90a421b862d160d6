"""API keys, members and the audit log in the store. No other module of `auth` uses the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TypeVar
from uuid import NAMESPACE_URL, uuid5

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.background import cancel_tasks
from llmops.clocks import wait_with_timeout
from llmops.errors import InputError, LlmopsError
from llmops.gateway.auth.audit import AuditCount, AuditLog
from llmops.gateway.auth.credential_cache import EXPIRED_KEY_MESSAGE, keys_unavailable
from llmops.gateway.auth.directory import CredentialUnavailableError, Directory, Identity
from llmops.gateway.errors import InvalidKeyError, UnavailableError
from llmops.gateway.interfaces import TENANT_PREFIX, Budget, Caller, Quota
from llmops.store.accounts.key_secrets import hash_secret, is_secret
from llmops.store.accounts.keys import KeyRow, find_keys, has_any_key, is_withdrawn
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import find_deleted_tenants, find_tenant
from llmops.store.accounts.users import bind_identity, ensure_user, find_user, find_user_by_identity
from llmops.store.audit import AuditContext, record_action
from llmops.store.columns import DAMAGED
from llmops.store.errors import is_data_error
from llmops.store.factory import LazyStore, open_store, within

T = TypeVar("T")

#: Maximum number of keys in one query. SQLite takes 32,766 values, and each key needs two; a
#: smaller query returns sooner.
MAX_KEYS_PER_QUERY = 500
#: Seconds after which a store that has not answered counts as unavailable. Requests with a key that
#: is not cached wait this long.
STORE_TIMEOUT = 2.0
_UNKNOWN_TENANT_MESSAGE = "The tenant in this token is not known here; ask the operator to create it."
_NOT_A_MEMBER_MESSAGE = (
    "The user in this token cannot be a member of its tenant; ask the operator to check the user's name and tenant."
)
_NOT_THE_OWNER_MESSAGE = (
    "The user in this token has an account here already, and the token does not verify that the address is its "
    "user's; ask the operator to set oidc.claims.user to email, or for tokens with the claim email."
)
_REJECTION_MESSAGES = {
    "revoked": "This API key was revoked; use another.",
    # The message does not reveal that the tenant was deleted.
    "tenant deleted": "This API key was revoked; use another.",
    "rotated": "This API key was rotated; use its new secret.",
    "expired": EXPIRED_KEY_MESSAGE,
}


#: A key's row, or the reason why the key cannot be checked.
_Found = KeyRow | UnavailableError


class KeyDirectory(Directory):
    """A directory of the API keys in the store.

    Only one query for keys runs at a time; look-ups that arrive in the meantime share the next
    query. Look-ups of the same user of an identity provider also share a query, because a user may
    have any number of tokens.
    """

    def __init__(self, url: str) -> None:
        self._store = LazyStore(url, pool_size=2)
        self._waiting: dict[str, asyncio.Future[_Found | None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._members: dict[tuple[str, str, Identity, bool], asyncio.Task[Caller]] = {}

    def takes(self, credential: str) -> bool:
        return is_secret(credential)

    async def find(self, credential: str) -> Caller | None:
        hashed = hash_secret(credential)
        row = await self._row(hashed)
        if row is None:
            return None
        state = row.state(datetime.now(UTC))
        if state != "active":
            raise InvalidKeyError(_REJECTION_MESSAGES[state])
        return _caller(row, hashed)

    async def has_credentials(self) -> bool:
        return await self._ask(has_any_key)

    async def ended(self, callers: Collection[Caller]) -> Collection[Caller]:
        now, found, deleted = datetime.now(UTC), dict[str, _Found](), set[str]()
        for hashes in _batches({caller.secret_hash for caller in callers}):
            found.update(await self._ask(partial(_find_each, hashes=hashes)))
        for names in _batches({caller.tenant_id for caller in callers if not caller.secret_hash}):
            deleted.update(await self._ask(partial(find_deleted_tenants, names=names)))

        def ends(caller: Caller) -> bool:
            if not caller.secret_hash:
                return caller.tenant_id in deleted
            # A secret that was replaced twice is not in the store any longer.
            key = found.get(caller.secret_hash)
            return key is None or (isinstance(key, KeyRow) and key.ends_answers(now))

        return {caller for caller in callers if ends(caller)}

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await cancel_tasks(*self._members.values())
        await self._store.close()

    async def member(
        self,
        tenant: str,
        user: str,
        identity: Identity,
        scopes: frozenset[str],
        until: float,
        *,
        owns_address: bool = True,
    ) -> Caller:
        """Return the caller for a user of an identity provider; create the user on first use.

        The user stays bound to `identity`: another identity with the same address is another
        person.

        Args:
            tenant: The name of the tenant.
            user: The address of the user.
            identity: The issuer and the subject of the token.
            scopes: The scopes of the token.
            until: The end of the token, in seconds since 1970.
            owns_address: Whether the issuer vouches that the address is the user's. If not, the
                first token creates a user who is not the user of that address, nor becomes it.

        Raises:
            InvalidKeyError: The tenant does not exist, or the user is invalid, belongs to another
                tenant or may be another person.
            UnavailableError: The store cannot be reached.
            CredentialUnavailableError: The store failed on this user.
        """
        try:
            found = await self._shared_member(tenant, user, identity, owns_address)
            return replace(found, scopes=scopes, until=until)
        except (InvalidKeyError, CredentialUnavailableError):
            raise
        except (SQLAlchemyError, ValueError, TypeError, OverflowError) as error:
            # The store failed on the values of this token, but answers queries for other tokens.
            if is_data_error(error):
                raise InvalidKeyError(_NOT_A_MEMBER_MESSAGE) from error
            raise CredentialUnavailableError(
                f"The store failed ({type(error).__name__}); see the log of the database server."
            ) from error
        except TimeoutError as error:
            raise keys_unavailable(
                f"The store did not answer within {STORE_TIMEOUT:g} s; check the database server."
            ) from error
        except LlmopsError as error:
            raise keys_unavailable(error.message) from error

    async def _shared_member(self, tenant: str, user: str, identity: Identity, owns_address: bool) -> Caller:
        key = tenant, user, identity, owns_address
        task = self._members.get(key)
        if task is None:
            work = wait_with_timeout(STORE_TIMEOUT, self._member(*key))
            task = self._members[key] = asyncio.create_task(work, name="find-member")
            task.add_done_callback(lambda _: self._members.pop(key, None))
        return await asyncio.shield(task)

    async def _member(self, tenant: str, user: str, identity: Identity, owns_address: bool) -> Caller:
        async with self._store.read() as connection:
            try:
                of, known = await find_tenant(connection, tenant), await find_user_by_identity(connection, *identity)
            except DAMAGED as error:
                if await find_deleted_tenants(connection, [tenant]):
                    raise InvalidKeyError(_UNKNOWN_TENANT_MESSAGE) from error
                what = (
                    f"The row of tenant {tenant}, or of a user, is damaged ({type(error).__name__}); correct it in the "
                    "store."
                )
                raise CredentialUnavailableError(what) from error
        if of is None or of.deleted_at is not None:
            raise InvalidKeyError(_UNKNOWN_TENANT_MESSAGE)
        if known is None:
            by = AuditContext("oidc", datetime.now(UTC))
            async with self._store.write() as connection:
                try:
                    # another request with this identity may have created the user
                    known = await find_user_by_identity(connection, *identity)
                    if known is None and not owns_address and await find_user(connection, user):
                        raise InvalidKeyError(_NOT_THE_OWNER_MESSAGE)
                    unverified = "" if owns_address else uuid5(NAMESPACE_URL, "#".join(identity)).hex[:12]
                    owner = await ensure_user(connection, tenant, user, by, unverified=unverified)
                    known = await bind_identity(connection, owner, *identity, by)
                except InputError as error:
                    raise InvalidKeyError(_NOT_A_MEMBER_MESSAGE) from error
        if known.tenant_id != tenant:
            raise InvalidKeyError(_NOT_A_MEMBER_MESSAGE)
        quotas = _quotas(f"{TENANT_PREFIX}{tenant}", of.limits)
        share = f"{tenant}/{known.id}"
        return Caller(tenant, known.id, "", share, known.tier, quotas=tuple(quotas))

    async def _row(self, hashed: str) -> KeyRow | None:
        waiting = self._waiting.get(hashed)
        if waiting is None:
            waiting = self._waiting[hashed] = asyncio.get_running_loop().create_future()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="find-keys")
        found = await asyncio.shield(waiting)
        if isinstance(found, UnavailableError):
            raise found
        return found

    async def _look(self) -> None:
        try:
            while self._waiting:
                batch = dict(islice(self._waiting.items(), MAX_KEYS_PER_QUERY))
                for hashed in batch:
                    del self._waiting[hashed]
                found = await self._find(list(batch))
                for hashed, waiting in batch.items():
                    if not waiting.done():
                        waiting.set_result(found if isinstance(found, UnavailableError) else found.get(hashed))
        finally:
            self._looking = None

    async def _find(self, hashes: Sequence[str]) -> Mapping[str, _Found] | UnavailableError:
        try:
            return await self._ask(partial(_find_each, hashes=hashes))
        except UnavailableError as error:
            return error

    async def _ask(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        try:
            return await within(STORE_TIMEOUT, self._store.ask(work))
        except LlmopsError as error:
            raise keys_unavailable(error.message) from error


class StoreAuditLog(AuditLog):
    """An audit log in the store."""

    def __init__(self, url: str) -> None:
        self._store = LazyStore(url, pool_size=1)

    async def write(self, entries: Sequence[AuditCount]) -> None:
        async with self._store.write() as connection:
            for entry in entries:
                details = {**dict(entry.details), "count": entry.count, "first": entry.first.isoformat()}
                by, tenant = AuditContext(entry.actor, entry.last), entry.tenant_id or None
                await record_action(connection, by, entry.action, entry.subject, tenant, details)

    async def close(self) -> None:
        await self._store.close()


async def _find_each(connection: AsyncConnection, hashes: Sequence[str]) -> Mapping[str, _Found]:
    """Return the rows of the keys with these hashes. A damaged row is an error of its own key only.

    A key that is damaged and revoked is as one that does not exist: the error would keep it in use
    for `lookups.stale`.
    """
    try:
        return await find_keys(connection, hashes)
    except DAMAGED as error:
        if len(hashes) == 1:
            if await is_withdrawn(connection, hashes[0]):
                return {}
            return {
                hashes[0]: CredentialUnavailableError(
                    f"A key's row is damaged ({type(error).__name__}); correct or delete it in the store."
                )
            }
    middle = len(hashes) // 2
    return {
        **await _find_each(connection, hashes[:middle]),
        **await _find_each(connection, hashes[middle:]),
    }


async def store_has_keys(url: str) -> bool:
    """Return True if the store has keys. Creates or migrates the store.

    Raises:
        LlmopsError: The store cannot be opened.
    """
    async with await open_store(url, pool_size=1) as store, store.read() as connection:
        return await has_any_key(connection)


def _batches(values: Collection[str]) -> Iterable[Sequence[str]]:
    """Return the values that are not empty, in lists for one query each."""
    ordered = sorted(filter(None, values))
    return (ordered[at : at + MAX_KEYS_PER_QUERY] for at in range(0, len(ordered), MAX_KEYS_PER_QUERY))


def _caller(row: KeyRow, hashed: str) -> Caller:
    ends = [moment.timestamp() for moment in (row.spec.expires_at, row.secret_until) if moment is not None]
    caller = Caller(
        tenant_id=row.tenant_id,
        user_id=row.user_id,
        key_id=row.id,
        share=f"{row.tenant_id}/{row.id}",
        tier=row.spec.tier,
        scopes=frozenset(row.spec.scopes),
        models=None if row.spec.models is None else frozenset(row.spec.models),
        quotas=(*_quotas(row.id, row.spec.limits), *_quotas(f"{TENANT_PREFIX}{row.tenant_id}", row.tenant_limits)),
        secret_hash=hashed,
    )
    return replace(caller, until=min(ends)) if ends else caller


def _quotas(owner: str, limits: Limits) -> Sequence[Quota]:
    budget = Budget(limits.budget.micros, limits.budget.period) if limits.budget else None
    quota = Quota(owner, limits.rpm, limits.tpm, limits.concurrent, budget)
    return () if quota == Quota(owner) else (quota,)
