"""Conversations and their messages. Every query of a request filters by the user who owns them.

The messages of a conversation form a tree. Each message names its parent, and the conversation
names the last message of the shown branch. Editing a message inserts a sibling, so nothing is
overwritten.
"""

import asyncio
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from time import thread_time
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    ScalarSelect,
    Select,
    and_,
    cast,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.store.columns import byte_length, database_time, machine_time, sum_of
from llmops.store.tables import conversations, messages

MAX_TITLE_LENGTH = 500
MAX_MODEL_LENGTH = 50
#: Maximum number of conversations that one statement of a purge deletes, because other writers wait
#: for the statement.
PURGE_BATCH_SIZE = 50
#: Number of characters that a message counts besides its texts, because also an empty message takes
#: a row and its index entries.
MESSAGE_SIZE = 256
#: Maximum number of characters that one statement of a purge deletes, because other writers wait
#: for the statement. Deleting 390 MB took SQLite two seconds.
PURGE_SIZE = 16_000_000
#: Maximum number of characters of messages that a search reads, which takes SQLite about half a
#: second.
SEARCH_SIZE = 64_000_000
#: Number of messages that are decoded at once: 4,000 would block the event loop for some 60 ms.
ROWS_AT_ONCE = 200
#: Pause after so many messages, as a multiple of the CPU time that they took.
DECODING_PAUSE = 2.0
#: Number of leading characters of a searched text that are passed to SQLite's LIKE, whose time is
#: proportional to this number.
LIKE_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation without its messages.

    `metadata` is JSON. `size` is the number of characters of the messages, as they count against
    limits, and of the system prompt and the metadata.
    """

    id: str
    user_id: str
    tenant_id: str = ""
    title: str | None = None
    model: str = ""
    system_prompt: str | None = None
    metadata: str = "{}"
    head_id: str | None = None
    size: int = 0
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class NewMessage:
    """A message to store.

    Attributes:
        item_id: Id of the message in the API.
        role: `user`, `assistant`, `system`, `developer` or `tool`.
        content: The text of the message.
        items: JSON of the items of the Responses API that the row represents, or None for a plain
            message.
        status: `completed`, `in_progress` while a gateway generates it, or `incomplete`.
        token_count: Number of tokens in the message, counted by the engine, or None if unknown.
        prompt_tokens: Number of tokens in the prompt of an answer, or None if unknown.
        cost_micros: Cost of an answer in micro-dollars, or None if the model has no price.
        model: Name of the model that wrote an answer, or None.
        finish_reason: Finish reason of an answer, or None.
        latency_ms: Duration of an answer in milliseconds, or None.
    """

    item_id: str
    role: str
    content: str
    items: str | None = None
    status: str = "completed"
    token_count: int | None = None
    prompt_tokens: int | None = None
    cost_micros: int | None = None
    model: str | None = None
    finish_reason: str | None = None
    latency_ms: int | None = None

    @property
    def size(self) -> int:
        """Return the number of characters by which the message counts against limits."""
        return MESSAGE_SIZE + len(self.content) + len(self.items or "")


@dataclass(frozen=True, kw_only=True)
class StoredMessage(NewMessage):
    """A stored message.

    `parent_id` is the parent in the tree. `position` is the number of the message in the order of
    writing.
    """

    id: str
    parent_id: str | None
    position: int
    created_at: datetime
    written_at: datetime


_CONVERSATION = [conversations.c[field.name] for field in fields(Conversation)]
_MESSAGE = [messages.c[field.name] for field in fields(StoredMessage)]


async def create_conversation(connection: AsyncConnection, new: Conversation) -> None:
    """Insert a conversation. A title or a model name that is too long is truncated."""
    values = {**vars(new), "title": new.title and new.title[:MAX_TITLE_LENGTH], "model": new.model[:MAX_MODEL_LENGTH]}
    values["updated_at"] = database_time(connection, new.updated_at)
    await connection.execute(insert(conversations).values(**values))


async def find_conversation(connection: AsyncConnection, user_id: str, conversation_id: str) -> Conversation | None:
    """Return the user's conversation, or None if it does not exist or is deleted."""
    row = (await connection.execute(select(*_CONVERSATION).where(_own(user_id, conversation_id)))).mappings().first()
    return None if row is None else Conversation(**row)


async def list_conversations(
    connection: AsyncConnection,
    user_id: str,
    *,
    limit: int = 50,
    before: Conversation | None = None,
    text: str | None = None,
) -> Sequence[Conversation]:
    """Return the user's conversations, the most recently changed first.

    System prompts and metadata are left out, because a page of them could be gigabytes.

    Args:
        connection: A connection to the store.
        user_id: The owner.
        limit: Maximum number of conversations.
        before: The last conversation of the previous page, or None for the first page.
        text: Only conversations whose title or messages contain this text, in any case. At most
            SEARCH_SIZE characters of messages are searched, in the newest conversations.
    """
    listed = [column for column in _CONVERSATION if column.name not in ("system_prompt", "metadata")]
    rows = await connection.execute((await _listed(connection, listed, user_id, before, text)).limit(limit))
    return [Conversation(**row) for row in rows.mappings()]


async def list_ids(
    connection: AsyncConnection, user_id: str, *, before: Conversation | None = None, text: str | None = None
) -> Sequence[str]:
    """Return the ids that `list_conversations` would return without a limit."""
    found = await connection.execute(await _listed(connection, [conversations.c.id], user_id, before, text))
    return [row[0] for row in found]


async def _listed(
    connection: AsyncConnection,
    columns: Sequence[Column[Any]],
    user_id: str,
    before: Conversation | None,
    text: str | None,
) -> Select[Any]:
    table = conversations.c
    statement = select(*columns).where(table.user_id == user_id, table.deleted_at.is_(None))
    if before is not None:
        earlier = and_(table.updated_at == before.updated_at, table.id > before.id)
        statement = statement.where(or_(table.updated_at < before.updated_at, earlier))
    if text:
        said = select(messages.c.id).where(messages.c.conversation_id == table.id, _contains(connection, text))
        oldest = await _oldest_searched(connection, user_id)
        if oldest is not None:
            said = said.where(table.updated_at >= oldest)
        # a scalar subquery, because PostgreSQL may run EXISTS over the messages of all users
        found = said.limit(1).scalar_subquery().is_not(None)
        statement = statement.where(or_(table.title.icontains(text, autoescape=True), found))
    return statement.order_by(table.updated_at.desc(), table.id)


def _contains(connection: AsyncConnection, text: str) -> ColumnElement[bool]:
    """Return the SQL condition that a message contains `text`, in any case."""
    content = messages.c.content
    if connection.dialect.name != "sqlite":
        # for ASCII text, folding only the case of ASCII letters is enough, and four times as fast
        folded = content.collate("C") if text.isascii() else content
        return func.strpos(func.lower(folded), func.lower(text)) > 0
    # LIKE finds candidates twice as fast as `lower` and `instr`, but takes time in proportion to
    # the length of its text, so LIKE gets only the beginning of the text.
    short = content.contains(text[:LIKE_LENGTH], autoescape=True)
    return and_(short, func.instr(func.lower(content), func.lower(text)) > 0)


async def _oldest_searched(connection: AsyncConnection, user_id: str) -> ScalarSelect[datetime] | None:
    """Return a subquery for the last change of the oldest conversation that a search covers.

    Return None if the search covers all conversations.
    """
    table = conversations.c
    own = table.user_id == user_id, table.deleted_at.is_(None)
    total = sum_of(table.size, connection.dialect.name)
    if ((await connection.execute(select(total).where(*own))).scalar() or 0) <= SEARCH_SIZE:
        return None
    newer = total.over(order_by=(table.updated_at.desc(), table.id)) - table.size
    ranked = select(table.updated_at, newer.label("newer")).where(*own).subquery()
    return select(func.min(ranked.c.updated_at)).where(ranked.c.newer < SEARCH_SIZE).scalar_subquery()


async def read_messages(connection: AsyncConnection, conversation_id: str) -> Sequence[StoredMessage]:
    """Return the messages of all branches, in the order of writing."""
    return await _read_messages(connection, conversation_id)


async def find_messages(connection: AsyncConnection, conversation_id: str, item_id: str) -> Sequence[StoredMessage]:
    """Return the messages that may have the item, in the order of writing.

    Their own id is `item_id`, or the JSON of their items contains this id as a string.
    """
    position = func.instr if connection.dialect.name == "sqlite" else func.strpos
    mentioned = position(messages.c["items"], json.dumps(item_id)) > 0
    return await _read_messages(connection, conversation_id, or_(messages.c.item_id == item_id, mentioned))


async def _read_messages(
    connection: AsyncConnection, conversation_id: str, *conditions: ColumnElement[bool]
) -> Sequence[StoredMessage]:
    columns = [machine_time(connection, one) if one.name == "written_at" else one for one in _MESSAGE]
    statement = select(*columns).where(messages.c.conversation_id == conversation_id, *conditions)
    rows = (await connection.execute(statement.order_by(messages.c.position))).mappings()
    found: list[StoredMessage] = []
    before = thread_time()
    while part := rows.fetchmany(ROWS_AT_ONCE):
        found += [StoredMessage(**row) for row in part]
        if len(part) == ROWS_AT_ONCE:
            await asyncio.sleep(DECODING_PAUSE * (thread_time() - before))
        before = thread_time()
    return found


async def newest_children(connection: AsyncConnection, conversation_id: str) -> dict[str | None, str]:
    """Return the id of the newest child of each message that has children, by the message's id."""
    statement = select(messages.c.parent_id, messages.c.id).where(messages.c.conversation_id == conversation_id)
    rows = await connection.execute(statement.order_by(messages.c.position))
    return {row.parent_id: row.id for row in rows}


async def lock_conversation(connection: AsyncConnection, user_id: str, conversation_id: str) -> Conversation | None:
    """Return the user's conversation, locked until the transaction ends, or None."""
    statement = select(*_CONVERSATION).where(_own(user_id, conversation_id)).with_for_update()
    row = (await connection.execute(statement)).mappings().first()
    return None if row is None else Conversation(**row)


async def append_messages(
    connection: AsyncConnection,
    conversation: Conversation,
    parent_id: str | None,
    new: Sequence[NewMessage],
    now: datetime,
) -> Sequence[StoredMessage]:
    """Append messages one after the other below `parent_id`, and show the branch that they end.

    Args:
        connection: The transaction in which `conversation` was locked.
        conversation: The conversation.
        parent_id: The parent of the first message, or None for the beginning of the conversation.
        new: The messages.
        now: The time of writing.
    """
    last = select(func.max(messages.c.position)).where(messages.c.conversation_id == conversation.id)
    position = ((await connection.execute(last)).scalar() or 0) + 1
    stored: list[StoredMessage] = []
    for message in new:
        row = StoredMessage(
            **vars(message),
            id=str(uuid4()),
            parent_id=parent_id,
            position=position + len(stored),
            created_at=now,
            written_at=now,
        )
        parent_id = row.id
        stored.append(row)
    if stored:
        rows = [{**vars(row), "model": _cut(row.model), "conversation_id": conversation.id} for row in stored]
        for values in rows:
            del values["written_at"]
        await connection.execute(insert(messages).values(written_at=database_time(connection, now)), rows)
    size = conversation.size + sum(row.size for row in stored)
    written_at = database_time(connection, now)
    await update_conversation(connection, conversation.id, head_id=parent_id, updated_at=written_at, size=size)
    return stored


async def show_message(connection: AsyncConnection, user_id: str, conversation_id: str, message_id: str) -> bool:
    """Show the branch that ends with a message.

    Return False if the message or its conversation was deleted.
    """
    if await lock_conversation(connection, user_id, conversation_id) is None:
        return False
    known = select(messages.c.id).where(messages.c.id == message_id).exists()
    statement = update(conversations).where(conversations.c.id == conversation_id, known).values(head_id=message_id)
    return (await connection.execute(statement)).rowcount > 0


async def update_conversation(connection: AsyncConnection, conversation_id: str, **values: Any) -> None:
    """Set columns of a conversation."""
    await connection.execute(update(conversations).where(conversations.c.id == conversation_id).values(**values))


async def update_message(
    connection: AsyncConnection, conversation_id: str, message: StoredMessage, now: datetime
) -> bool:
    """Replace a stored message by its new state.

    Return False if the message or its conversation was deleted meanwhile.
    """
    visible = select(conversations.c.id).where(
        conversations.c.id == conversation_id, conversations.c.deleted_at.is_(None)
    )
    known = select(messages.c.content, messages.c["items"]).where(messages.c.id == message.id, visible.exists())
    before = (await connection.execute(known.with_for_update())).first()
    if before is None:
        return False
    values = {**vars(message), "model": _cut(message.model), "written_at": database_time(connection, now)}
    await connection.execute(update(messages).where(messages.c.id == message.id).values(**values))
    grown = len(message.content) + len(message.items or "") - len(before.content) - len(before.items or "")
    size = conversations.c.size + grown
    await update_conversation(connection, conversation_id, size=size, updated_at=database_time(connection, now))
    return True


async def delete_message(connection: AsyncConnection, conversation: Conversation, message: StoredMessage) -> None:
    """Delete a message, whose children become children of the message's parent."""
    children = messages.c.conversation_id == conversation.id, messages.c.parent_id == message.id
    await connection.execute(update(messages).where(*children).values(parent_id=message.parent_id))
    await connection.execute(delete(messages).where(messages.c.id == message.id))
    head = message.parent_id if conversation.head_id == message.id else conversation.head_id
    await update_conversation(connection, conversation.id, head_id=head, size=conversation.size - message.size)


async def delete_conversation(connection: AsyncConnection, user_id: str, conversation_id: str, now: datetime) -> bool:
    """Hide a conversation until it is purged. Return False if the user has no such conversation."""
    deleted = {"deleted_at": database_time(connection, now)}
    statement = update(conversations).where(_own(user_id, conversation_id)).values(deleted)
    return (await connection.execute(statement)).rowcount > 0


async def count_messages(connection: AsyncConnection, conversation_id: str) -> int:
    """Return the number of messages in all branches of a conversation."""
    counted = select(func.count()).where(messages.c.conversation_id == conversation_id)
    return int((await connection.execute(counted)).scalar_one())


async def measure_messages(connection: AsyncConnection, conversation_id: str) -> tuple[int, int]:
    """Return the number of messages in all branches of a conversation, and the bytes of their texts."""
    content, items = (byte_length(connection, column) for column in (messages.c.content, messages.c["items"]))
    total = func.coalesce(func.sum(content + func.coalesce(items, 0)), 0)
    measured = select(func.count(), total).where(messages.c.conversation_id == conversation_id)
    row = (await connection.execute(measured)).one()
    return row[0], int(row[1])


async def count_conversations(connection: AsyncConnection, user_id: str) -> tuple[int, int]:
    """Return the number of the user's conversations, and the number of their characters."""
    counted = select(func.count(), func.coalesce(sum_of(conversations.c.size, connection.dialect.name), 0))
    row = (await connection.execute(counted.where(conversations.c.user_id == user_id))).one()
    return row[0], int(row[1])


async def purge_deleted(connection: AsyncConnection, before: datetime) -> int:
    """Purge up to PURGE_BATCH_SIZE conversations that were deleted before `before`.

    Return the number of purged conversations.
    """
    return await _purge(connection, conversations.c.deleted_at < database_time(connection, before))


async def list_inactive(
    connection: AsyncConnection, before: datetime, tenants: Sequence[str], others: bool, without: Collection[str] = ()
) -> Sequence[str]:
    """Return the ids of up to PURGE_BATCH_SIZE conversations that have not changed since `before`.

    Args:
        connection: A connection to the store.
        before: Only conversations whose last change was before this time.
        tenants: Only conversations of these tenants.
        others: Return the conversations of all tenants except `tenants` instead.
        without: Ids that are left out.
    """
    named = conversations.c.tenant_id.in_(tenants)
    condition = ~named if others else named
    old = conversations.c.updated_at < database_time(connection, before)
    return await _batch(connection, old, condition, conversations.c.id.not_in(without))


async def read_conversation(connection: AsyncConnection, conversation_id: str) -> Conversation | None:
    """Return a conversation of any user, even if it is deleted, or None if no such row exists."""
    statement = select(*_CONVERSATION).where(conversations.c.id == conversation_id)
    row = (await connection.execute(statement)).mappings().first()
    return None if row is None else Conversation(**row)


async def purge_inactive(connection: AsyncConnection, ids: Sequence[str], before: datetime) -> int:
    """Purge the conversations among `ids` that have not changed since `before`.

    Return the number of purged conversations.
    """
    old = conversations.c.updated_at < database_time(connection, before)
    return await _deleted(connection, and_(conversations.c.id.in_(ids), old))


async def purge_user(connection: AsyncConnection, user_id: str) -> int:
    """Delete up to PURGE_BATCH_SIZE conversations of a user permanently.

    Return the number of deleted conversations.
    """
    return await _purge(connection, conversations.c.user_id == user_id)


async def purge_tenant(connection: AsyncConnection, tenant_id: str) -> int:
    """Delete up to PURGE_BATCH_SIZE conversations of a tenant permanently.

    Return the number of deleted conversations.
    """
    return await _purge(connection, conversations.c.tenant_id == tenant_id)


async def conversation_ids(
    connection: AsyncConnection, *, user_id: str | None = None, tenant_id: str | None = None
) -> Sequence[tuple[str, str]]:
    """Return (owner, id) of the conversations of a user or tenant, the oldest first.

    Deleted conversations are left out.
    """
    owned = conversations.c.user_id == user_id if user_id is not None else conversations.c.tenant_id == tenant_id
    statement = select(conversations.c.user_id, conversations.c.id).where(owned, conversations.c.deleted_at.is_(None))
    rows = await connection.execute(statement.order_by(conversations.c.created_at))
    return [(row[0], row[1]) for row in rows]


async def _purge(connection: AsyncConnection, *conditions: ColumnElement[bool]) -> int:
    ids = await _batch(connection, *conditions)
    return await _deleted(connection, conversations.c.id.in_(ids)) if ids else 0


async def _batch(connection: AsyncConnection, *conditions: ColumnElement[bool]) -> Sequence[str]:
    """Return ids of conversations to delete at once, of up to PURGE_SIZE characters in total.

    A single conversation may be larger.
    """
    # a size that is damaged counts as 0
    size = cast(conversations.c.size, BigInteger)
    due = select(conversations.c.id, func.coalesce(size, 0)).where(*conditions).limit(PURGE_BATCH_SIZE)
    ids: list[str] = []
    total = 0
    for key, characters in await connection.execute(due):
        if not isinstance(key, str):
            continue  # SQLite finds no row by a damaged id
        total += characters
        if ids and total > PURGE_SIZE:
            break
        ids.append(key)
    return ids


async def _deleted(connection: AsyncConnection, condition: ColumnElement[bool]) -> int:
    return (await connection.execute(delete(conversations).where(condition))).rowcount


def _cut(model: str | None) -> str | None:
    return model and model[:MAX_MODEL_LENGTH]


def _own(user_id: str, conversation_id: str) -> ColumnElement[bool]:
    columns = conversations.c
    return and_(columns.id == conversation_id, columns.user_id == user_id, columns.deleted_at.is_(None))
