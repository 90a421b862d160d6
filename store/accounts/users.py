"""Who asks. A user belongs to one tenant permanently."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import InputError, UnknownNameError
from llmops.store.accounts.meant import meant
from llmops.store.audit import By, record
from llmops.store.tables import users
from llmops.store.upsert import insert

DEFAULT_TIER = "free"
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")


@dataclass(frozen=True)
class User:
    """`tier` is that of new keys."""

    id: str
    email: str
    tier: str
    tenant_id: str
    created_at: datetime


async def ensure_user(
    connection: AsyncConnection, tenant_id: str, email: str, by: By, tier: str = DEFAULT_TIER
) -> User:
    """The user of this address, made where there is none.

    Raises InputError for an invalid address, and for a user of another tenant.
    """
    email = email.lower()
    if not _EMAIL.fullmatch(email) or len(email) > 255:
        raise InputError(f"{email!r} is not an e-mail address.")
    values = {"id": str(uuid4()), "email": email, "tier": tier, "tenant_id": tenant_id, "created_at": by.at}
    done = await connection.execute(insert(connection, users).values(values).on_conflict_do_nothing())
    if done.rowcount:
        await record(connection, by, "user.create", email, tenant_id, {"tier": tier})
    found = await require_user(connection, email)
    if found.tenant_id != tenant_id:
        # not whose: an admin of one tenant must learn nothing about another
        raise InputError(f"{email} belongs to another tenant; a user cannot change tenants, so use another address.")
    return found


async def find_user(connection: AsyncConnection, email: str) -> User | None:
    columns = select(users.c.id, users.c.email, users.c.tier, users.c.tenant_id, users.c.created_at)
    row = (await connection.execute(columns.where(users.c.email == email.lower()))).mappings().first()
    return None if row is None else User(**row)


async def require_user(connection: AsyncConnection, email: str) -> User:
    """Raises UnknownNameError for one that is not there, with the address that was meant perhaps."""
    found = await find_user(connection, email)
    if found is None:
        known = (await connection.execute(select(users.c.email))).scalars().all()
        raise UnknownNameError(
            f"There is no user {email}{meant(email, known)}; `llmops key create --user {email}` makes one."
        )
    return found
