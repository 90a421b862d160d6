"""Users, who own keys. A user belongs to one tenant permanently."""

import re
from dataclasses import dataclass
from datetime import datetime
from unicodedata import normalize
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import InputError, UnknownResourceError
from llmops.store.accounts.tenants import MAX_COMPARED, did_you_mean
from llmops.store.audit import AuditContext, record_action
from llmops.store.columns import insert
from llmops.store.damaged_rows import name_damaged
from llmops.store.tables import identities, users
from llmops.untrusted_text import escape_unsafe, is_safe_text

DEFAULT_TIER = "free"
_TIER = re.compile(r"[a-z0-9][a-z0-9_-]{0,19}")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_COLUMNS = select(users.c.id, users.c.email, users.c.tier, users.c.tenant_id, users.c.created_at)


@dataclass(frozen=True)
class User:
    """A user. `tier` is the default tier of the user's new keys."""

    id: str
    email: str
    tier: str
    tenant_id: str
    created_at: datetime


def check_tier(tier: str) -> None:
    """Raise InputError if this is not a tier."""
    if not _TIER.fullmatch(tier):
        raise InputError(f"{tier[:40]!r} is not a tier; write up to 20 lower-case letters, digits, - and _.")


async def ensure_user(
    connection: AsyncConnection,
    tenant_id: str,
    email: str,
    by: AuditContext,
    tier: str = DEFAULT_TIER,
    unverified: str = "",
) -> User:
    """Return the user with an e-mail address, and create the user if necessary.

    Args:
        connection: A connection to the store.
        tenant_id: The tenant of the user.
        email: The address.
        by: Who creates the user.
        tier: The default tier of a new user.
        unverified: For an address that may be another person's, an id of who claims it. The user is
            then not the user of the address, but has a name that no address can be.

    Raises:
        InputError: The tier or the address is invalid, or the address belongs to a user of another
            tenant.
    """
    check_tier(tier)
    # Python lower-cases the Kelvin sign to k, so that this address would find the user of kate@x
    has_one_form = normalize("NFKC", email) == email
    name = f"{email} (unverified {unverified})".lower() if unverified else email.lower()
    if not has_one_form or not _EMAIL.fullmatch(email) or len(name) > 255 or not is_safe_text(email):
        raise InputError(f"'{escape_unsafe(email)}' is not an e-mail address; write one such as ann@example.com.")
    values = {"id": str(uuid4()), "email": name, "tier": tier, "tenant_id": tenant_id, "created_at": by.at}
    done = await connection.execute(insert(connection, users).values(values).on_conflict_do_nothing())
    if done.rowcount:
        await record_action(connection, by, "user.create", name, tenant_id, {"tier": tier})
    found = await require_user(connection, name)
    if found.tenant_id != tenant_id:
        # the other tenant is not named, because an admin of this tenant must not learn its name
        raise InputError(f"{email} belongs to another tenant; a user cannot change tenants, so use another address.")
    return found


async def find_user_by_identity(connection: AsyncConnection, issuer: str, subject: str) -> User | None:
    """Return the user bound to this subject of an identity provider, or None."""
    bound = (identities.c.user_id == users.c.id, identities.c.issuer == issuer, identities.c.subject == subject)
    row = (await connection.execute(_COLUMNS.where(*bound))).mappings().first()
    return None if row is None else User(**row)


async def bind_identity(connection: AsyncConnection, user: User, issuer: str, subject: str, by: AuditContext) -> User:
    """Bind a user to a subject of an identity provider.

    Call this function in the transaction that found or created the user.

    Raises:
        InputError: The user is bound to another subject of this provider. Providers can reassign an
            address to another person, who must not get the user's data. To admit the new person,
            delete the row in `identities`.
    """
    # another request may bind another subject at the same time
    await connection.execute(select(users.c.id).where(users.c.id == user.id).with_for_update())
    here = select(identities.c.subject).where(identities.c.user_id == user.id, identities.c.issuer == issuer)
    bound = (await connection.execute(here)).scalars().all()
    if bound and subject not in bound:
        raise InputError(
            f"{user.email} is bound to another account of its identity provider; use that account, or another address."
        )
    if not bound:
        values = {"issuer": issuer, "subject": subject, "user_id": user.id, "created_at": by.at}
        done = await connection.execute(insert(connection, identities).values(values).on_conflict_do_nothing())
        if done.rowcount:
            detail = {"issuer": issuer, "subject": subject}
            await record_action(connection, by, "user.bind", user.email, user.tenant_id, detail)
    return await find_user_by_identity(connection, issuer, subject) or user


async def find_user(connection: AsyncConnection, email: str) -> User | None:
    """Return the user with this address, or None. Raises InputError if a value of the row is damaged."""
    with name_damaged("user", email):
        row = (await connection.execute(_COLUMNS.where(users.c.email == email.lower()))).mappings().first()
        return None if row is None else User(**row)


async def require_user(connection: AsyncConnection, email: str) -> User:
    """Return the user with this address.

    Raises:
        UnknownResourceError: No user has this address. The message suggests a similar address.
    """
    found = await find_user(connection, email)
    if found is None:
        alike = users.c.email.startswith(email[:3].lower(), autoescape=True)
        known = await connection.scalars(select(users.c.email).where(alike).order_by(users.c.email).limit(MAX_COMPARED))
        near = did_you_mean(email.lower(), known)
        raise UnknownResourceError(f"There is no user {email}{near}; `llmops key create --user {email}` makes one.")
    return found
