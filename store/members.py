"""A tenant's users, where PostgreSQL would otherwise read everybody's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, any_, func, select

from llmops.store.tables import users

_members = users.alias("members")


def of_members(user_id: ColumnElement[str], tenant: Any, dialect: str) -> Iterator[ColumnElement[bool]]:
    """The condition that `user_id` is one of the users of `tenant`, beside a join with `users` that says the same.

    An array makes PostgreSQL look up each of them in the index. From the join it expects rows in so many places that it
    reads the whole table, of all tenants. SQLite looks them up anyhow.
    """
    if dialect == "postgresql":
        ids = select(_members.c.id).where(_members.c.tenant_id == tenant).scalar_subquery()
        yield user_id == any_(func.array(ids))
