"""Chats that are kept. Every query has the user's id: whose a conversation is not, to them it is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import uuid4

from sqlalchemy import ColumnElement, Select, and_, false, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import InputError
from llmops.store.ids import canonical
from llmops.store.tables import conversations, messages

LONGEST_TITLE = 500
LONGEST_MODEL = 50


@dataclass(frozen=True)
class Conversation:
    """Without its messages."""

    id: str
    title: str | None
    model: str
    system_prompt: str | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True)
class NewMessage:
    """A message to be kept; `token_count` as the engine counted it, `latency_ms` of an answer."""

    role: str
    content: str
    token_count: int | None = None
    model: str | None = None
    finish_reason: str | None = None
    latency_ms: int | None = None


@dataclass(frozen=True)
class Message(NewMessage):
    """A message that was kept."""

    id: str = ""
    created_at: datetime | None = None


async def create_conversation(
    connection: AsyncConnection,
    user_id: str,
    model: str,
    now: datetime,
    title: str | None = None,
    system_prompt: str | None = None,
) -> Conversation:
    """A title that is too long is cut. Raises InputError for a model's name that is."""
    if len(model) > LONGEST_MODEL:
        raise InputError(f"A conversation's model has a name of at most {LONGEST_MODEL} characters.")
    made = Conversation(str(uuid4()), title[:LONGEST_TITLE] if title else None, model, system_prompt, now, now)
    await connection.execute(conversations.insert().values(user_id=user_id, **vars(made)))
    return made


async def append_messages(
    connection: AsyncConnection, user_id: str, conversation_id: str, new: Sequence[NewMessage], now: datetime
) -> bool:
    """Keep what was said, in this order; False when the user has no such conversation."""
    statement = conversations.update().where(_of(user_id, conversation_id)).values(updated_at=now)
    if (await connection.execute(statement)).rowcount == 0:
        return False
    # a microsecond apart, so that their order is that of the index
    rows = [
        {**vars(message), "id": str(uuid4()), "conversation_id": conversation_id}
        | {"created_at": now + timedelta(microseconds=place)}
        for place, message in enumerate(new)
    ]
    if rows:
        await connection.execute(messages.insert(), rows)
    return True


async def list_conversations(
    connection: AsyncConnection, user_id: str, limit: int = 50, before: Conversation | None = None
) -> Sequence[Conversation]:
    """Those last spoken in first; `before`: the last one of the page before."""
    table = conversations.c
    wanted = _conversations().where(table.user_id == user_id, table.deleted_at.is_(None))
    if before is not None:
        wanted = wanted.where(
            or_(
                table.updated_at < before.updated_at,
                and_(table.updated_at == before.updated_at, table.id > before.id),
            )
        )
    wanted = wanted.order_by(table.updated_at.desc(), table.id).limit(limit)
    return [Conversation(*row) for row in await connection.execute(wanted)]


async def get_conversation(
    connection: AsyncConnection, user_id: str, conversation_id: str
) -> tuple[Conversation, Sequence[Message]] | None:
    """With all that was said; None when the user has no such conversation."""
    found = (await connection.execute(_conversations().where(_of(user_id, conversation_id)))).first()
    if found is None:
        return None
    columns = [column for column in messages.c if column.name != "conversation_id"]
    wanted = select(*columns).where(messages.c.conversation_id == conversation_id)
    rows = await connection.execute(wanted.order_by(messages.c.created_at, messages.c.id))
    return Conversation(*found), [Message(**row) for row in rows.mappings()]


async def delete_conversation(connection: AsyncConnection, user_id: str, conversation_id: str, now: datetime) -> bool:
    """Out of the user's sight, until `purge_conversations`; False when the user has no such conversation."""
    statement = conversations.update().where(_of(user_id, conversation_id)).values(deleted_at=now)
    return (await connection.execute(statement)).rowcount > 0


async def purge_conversations(connection: AsyncConnection, before: datetime, limit: int = 1000) -> int:
    """Purge up to `limit` conversations deleted before `before`, with their messages; returns how many."""
    due = select(conversations.c.id).where(conversations.c.deleted_at < before).limit(limit)
    return (await connection.execute(conversations.delete().where(conversations.c.id.in_(due)))).rowcount


def _conversations() -> Select:
    columns = conversations.c
    return select(
        columns.id, columns.title, columns.model, columns.system_prompt, columns.created_at, columns.updated_at
    )


def _of(user_id: str, conversation_id: str) -> ColumnElement[bool]:
    """The conversation, when it is the user's and not deleted. What has not the form of an id matches nothing."""
    try:
        known = canonical(conversation_id)
    except ValueError:
        return false()
    columns = conversations.c
    return and_(columns.id == known, columns.user_id == user_id, columns.deleted_at.is_(None))
