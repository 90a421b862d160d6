"""Stored responses of the Responses API. Every query of a request filters by the owner."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, String, and_, cast, delete, func, insert, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.columns import database_time, machine_time, sum_of
from llmops.store.tables import purges, response_items, responses, users


async def put_response(
    connection: AsyncConnection,
    row: Mapping[str, Any],
    item_ids: Collection[str],
    new: bool = True,
    began: datetime | None = None,
) -> bool:
    """Replace a response and its item ids, or insert them if `new` is set.

    Args:
        connection: A transaction.
        row: Values of the columns of `responses`: `response`, `items` and `cuts` are JSON, `size`
            is their number of characters. `running` is True while a gateway generates the response,
            `cancelled` once another gateway has requested its end.
        item_ids: Ids of the items in the response.
        new: True to insert the response if it is not stored, False to replace it only.
        began: Time at which the response began, or None if it is already stored.

    Returns:
        False, without a change, if the response or all data of its owner was deleted meanwhile, or
            if it is running and was cancelled or finished.
    """
    response_id, owner = row["id"], row["owner"]
    if not new:
        known = select(responses.c.running, responses.c.cancelled).where(_own(response_id, owner))
        stored = (await connection.execute(known.with_for_update())).first()
        if stored is None or (row["running"] and (stored.cancelled or not stored.running)):
            return False
    await connection.execute(delete(responses).where(_own(response_id, owner)))
    kept = {**row, "written_at": database_time(connection, row["written_at"])}
    await connection.execute(insert(responses).values(**kept))
    if item_ids:
        taken = and_(response_items.c.owner == owner, response_items.c.id.in_(item_ids))
        await connection.execute(delete(response_items).where(taken))
        rows = [{"owner": owner, "id": one, "response_id": response_id} for one in sorted(set(item_ids))]
        await connection.execute(insert(response_items), rows)
    if began is not None:
        # Checked last: a purge that begins after the check also finds and deletes this response.
        began_at = database_time(connection, began)
        later = select(purges.c.owner).where(purges.c.owner == owner, purges.c.purged_at >= began_at)
        if (await connection.execute(later.limit(1))).first() is not None:
            await delete_response(connection, response_id, owner)
            return False
    return True


async def note_purge(
    connection: AsyncConnection, owner: str, tenant_id: str, purged_at: datetime, forget: datetime
) -> None:
    """Record a purge, so that responses that began before `purged_at` are not stored any longer.

    End the transaction before deleting responses.

    Args:
        connection: A transaction.
        owner: The owner whose responses are purged, if there is no `tenant_id`.
        tenant_id: The tenant whose users' responses are purged, or an empty string.
        purged_at: The time of the purge.
        forget: Records of purges before this time are deleted.
    """
    await connection.execute(delete(purges).where(purges.c.purged_at < database_time(connection, forget)))
    at = database_time(connection, purged_at)
    owners = select(cast(users.c.id, String) if tenant_id else literal(owner), at)
    owners = owners.where(users.c.tenant_id == tenant_id) if tenant_id else owners
    await connection.execute(insert(purges).from_select(["owner", "purged_at"], owners))


async def evict_responses(connection: AsyncConnection, owner: str, before: datetime, entries: int, size: int) -> None:
    """Delete the owner's old responses.

    Responses written before `before` are deleted, and the oldest responses beyond `entries` rows or
    `size` characters. The newest response stays in the second case.
    """
    old = responses.c.written_at < database_time(connection, before)
    await connection.execute(delete(responses).where(responses.c.owner == owner, old))
    newest = (responses.c.written_at.desc(), responses.c.id)
    ranked = (
        select(
            responses.c.id,
            func.row_number().over(order_by=newest).label("place"),
            sum_of(responses.c.size, connection.dialect.name).over(order_by=newest).label("total"),
        )
        .where(responses.c.owner == owner)
        .subquery()
    )
    over = select(ranked.c.id).where(ranked.c.place > 1, (ranked.c.place > entries) | (ranked.c.total > size))
    await connection.execute(delete(responses).where(responses.c.id.in_(over)))


async def find_response(
    connection: AsyncConnection, response_id: str, owner: str, since: datetime
) -> RowMapping | None:
    """Return the owner's response if it was written at or after `since`, otherwise None."""
    written_at = machine_time(connection, responses.c.written_at)
    columns = [written_at if one.name == "written_at" else one for one in responses.c]
    recent = responses.c.written_at >= database_time(connection, since)
    wanted = select(*columns).where(_own(response_id, owner), recent)
    return (await connection.execute(wanted)).mappings().first()


async def find_responses_with_items(
    connection: AsyncConnection, item_ids: Collection[str], owner: str, since: datetime
) -> Sequence[tuple[str, int]]:
    """Return (id, size) of each of the owner's responses that holds any of these items.

    Responses that were written before `since` are left out.
    """
    recent = responses.c.written_at >= database_time(connection, since)
    wanted = (
        select(responses.c.id, responses.c.size)
        .distinct()
        .join(response_items, response_items.c.response_id == responses.c.id)
        .where(response_items.c.owner == owner, response_items.c.id.in_(item_ids), recent)
    )
    return [(row.id, row.size) for row in await connection.execute(wanted)]


async def response_chain(
    connection: AsyncConnection, response_id: str, owner: str, since: datetime, limit: int
) -> Sequence[tuple[str, int, str | None]]:
    """Return a response and up to `limit` - 1 of its predecessors, the newest first.

    Each response is returned as (id, size, previous id). The chain ends before a response that was
    written before `since`.
    """
    columns, oldest = responses.c, database_time(connection, since)
    first = select(columns.id, columns.size, columns.previous_id, literal(0).label("place"))
    chain = first.where(_own(response_id, owner), columns.written_at >= oldest).cte("chain", recursive=True)
    step = select(columns.id, columns.size, columns.previous_id, chain.c.place + 1).join(
        chain, columns.id == chain.c.previous_id
    )
    chain = chain.union_all(step.where(columns.owner == owner, columns.written_at >= oldest, chain.c.place < limit - 1))
    wanted = select(chain.c.id, chain.c.size, chain.c.previous_id).order_by(chain.c.place)
    return [(row.id, row.size, row.previous_id) for row in await connection.execute(wanted)]


async def list_responses(connection: AsyncConnection, owner: str, tenant_id: str = "") -> Sequence[tuple[str, str]]:
    """Return (id, owner) of all responses of an owner, or of a tenant's users, the oldest first."""
    wanted = (
        select(responses.c.id, responses.c.owner)
        .where(_owned(owner, tenant_id))
        .order_by(responses.c.written_at, responses.c.id)
    )
    return [(row.id, row.owner) for row in await connection.execute(wanted)]


async def delete_response(connection: AsyncConnection, response_id: str, owner: str) -> bool:
    """Delete a response. Return False if the owner has no response with this id."""
    return (await connection.execute(delete(responses).where(_own(response_id, owner)))).rowcount > 0


async def delete_responses(connection: AsyncConnection, owner: str, tenant_id: str = "") -> None:
    """Delete all responses of an owner, or of a tenant's users."""
    await connection.execute(delete(responses).where(_owned(owner, tenant_id)))


async def cancel_response(connection: AsyncConnection, response_id: str, owner: str) -> None:
    """Mark a running response as cancelled, so that the gateway that generates it stops."""
    running = and_(_own(response_id, owner), responses.c.running)
    await connection.execute(update(responses).where(running).values(cancelled=True))


def _own(response_id: str, owner: str) -> ColumnElement[bool]:
    return and_(responses.c.id == response_id, responses.c.owner == owner)


def _owned(owner: str, tenant_id: str) -> ColumnElement[bool]:
    members = select(cast(users.c.id, String)).where(users.c.tenant_id == tenant_id)
    return responses.c.owner.in_(members) if tenant_id else responses.c.owner == owner
