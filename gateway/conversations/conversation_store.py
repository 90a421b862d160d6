"""The store of conversations: the deployment's store, or a store in this machine's cache folder.

A public id is `conv_` followed by the hexadecimal digits of a UUID. The API treats conversations of
other owners as if they did not exist.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableSequence, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID, uuid4

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.clocks import utc_now
from llmops.gateway.conversations.database import Database
from llmops.gateway.errors import ForbiddenError, InvalidRequestError, NotFoundError, RateLimitError
from llmops.gateway.interfaces import Caller
from llmops.gateway.logging_setup import RepeatedLines
from llmops.gateway.settings import ConversationSettings
from llmops.input_files import MALFORMED
from llmops.store import conversations as table
from llmops.store.conversations import Conversation, NewMessage, StoredMessage
from llmops.store.usage_writes import GATEWAY_LOST

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds without a write after which the gateway that generates a message counts as lost.
LOST_AFTER = 10.0
#: Minimum seconds between two log lines about the same damaged conversation.
LOG_INTERVAL = 60.0
#: Number of copies of a conversation that a request holds in memory: as rows, as messages, and as
#: text to send.
COPIES = 3
#: Bytes of memory that a message takes besides its text, as a row and as part of a request.
MESSAGE_BYTES = 3072
#: Part of an owner's free characters that a gateway process lets the owner write before it counts
#: the owner's conversations again: what other processes write meanwhile is not counted.
ROOM_SHARE = 256
#: Maximum number of owners whose room is remembered.
MAX_ROOMS = 10_000
#: Maximum length of a title made from the first message, in characters: one line of a list.
TITLE_LENGTH = 60
_ID = re.compile(r"conv_[0-9a-f]{32}")


class Branch(NamedTuple):
    """A conversation with the messages of one branch, and the messages of all branches."""

    conversation: Conversation
    messages: Sequence[StoredMessage]
    every: Sequence[StoredMessage]


class ConversationStore:
    """The stored conversations.

    Every method raises UnavailableError while the store is unavailable.
    """

    def __init__(self, url: str, settings: ConversationSettings, now: Callable[[], datetime] = utc_now) -> None:
        self.settings, self._now = settings, now
        self._database = Database(url, "Conversations", "send the request without a conversation")
        self._lines = RepeatedLines(LOG_INTERVAL)
        # the characters that each owner may still write before the conversations are counted again
        self._room: dict[str, int] = {}

    async def close(self) -> None:
        await self._database.close()

    # -- conversations

    async def create(
        self,
        caller: Caller,
        messages: Sequence[NewMessage] = (),
        *,
        title: str | None = None,
        model: str = "",
        system_prompt: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Conversation:
        """Create a conversation that begins with `messages`.

        Raises:
            ForbiddenError: Conversations of this tenant are not stored.
            RateLimitError: The owner has the maximum number or size of conversations.
        """
        if not self.settings.entries or not self.settings.stores(caller.tenant_id):
            raise ForbiddenError(
                "The gateway's settings do not allow this tenant to store conversations. Send the whole history as "
                "`messages`.",
                code="conversations_not_stored",
            )
        now, shown = self._now(), json.dumps(metadata or {})
        made = Conversation(
            id=str(uuid4()),
            user_id=owner_id(caller),
            tenant_id=caller.tenant_id,
            title=title or make_title(messages),
            model=model,
            system_prompt=system_prompt,
            metadata=shown,
            size=len(system_prompt or "") + len(shown),
            created_at=now,
            updated_at=now,
        )

        async def work(connection: AsyncConnection) -> Conversation:
            self._check_size(made.size)
            await self._check_room(connection, made.user_id, made.size + _size(messages), new=1)
            await table.create_conversation(connection, made)
            if messages:
                await self._append(connection, made, None, messages)
            found = await table.find_conversation(connection, made.user_id, made.id)
            assert found is not None
            return found

        return await self._database.write(work, made.user_id)

    async def find(self, caller: Caller, conversation_id: str) -> Conversation:
        """Return a conversation.

        Raises:
            NotFoundError: The caller has no such conversation.
        """
        key, user = row_id(conversation_id), owner_id(caller)
        found = await self._database.read(lambda connection: table.find_conversation(connection, user, key))
        return _require_found(found, conversation_id)

    async def list(
        self, caller: Caller, *, limit: int, after: str | None = None, text: str | None = None
    ) -> tuple[Sequence[Conversation], bool]:
        """Return a page of conversations, most recently changed first, and True if more follow.

        Args:
            caller: The caller whose conversations are listed.
            limit: The maximum number of conversations.
            after: The id of the last conversation of the previous page, or None for the first page.
            text: A text that the title or a message must contain, or None.

        Raises:
            NotFoundError: The caller has no conversation `after`.
        """
        before = await self.find(caller, after) if after else None
        user = owner_id(caller)

        async def work(connection: AsyncConnection) -> Sequence[Conversation]:
            return await table.list_conversations(connection, user, limit=limit + 1, before=before, text=text)

        found = await (self._read_long(caller, work) if text else self._database.read(work, user))
        return found[:limit], len(found) > limit

    async def list_readable(
        self,
        caller: Caller,
        check: Callable[[Conversation], object],
        *,
        limit: int,
        after: str | None = None,
        text: str | None = None,
    ) -> tuple[Sequence[Conversation], bool]:
        """Return a page of conversations like `list`, without damaged conversations.

        The conversations are read one by one. `check` raises an error of MALFORMED for a
        conversation that cannot be used.
        """
        before = await self.find(caller, after) if after else None
        user = owner_id(caller)
        ids = await self._read_long(
            caller, lambda connection: table.list_ids(connection, user, before=before, text=text)
        )
        found: MutableSequence[Conversation] = []
        for key in ids:
            try:
                # Drop what may be large together, as in `list_conversations`.
                one = replace(await self.find(caller, _public_id(key)), system_prompt=None, metadata="{}")
                check(one)
            except NotFoundError:
                continue
            except MALFORMED:
                if (suffix := self._lines.suffix(key)) is not None:
                    log.error(
                        "%s was left out of a list because its row in the store is damaged; restore or delete it.%s",
                        _public_id(key),
                        suffix,
                    )
                continue
            found.append(one)
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    async def read(
        self,
        caller: Caller,
        conversation_id: str,
        after: str | None = None,
        hold: Callable[[int], None] = lambda size: None,
    ) -> Branch:
        """Return a conversation and one of its branches.

        The branch ends with the message `after`, or is the current branch.

        Args:
            caller: The owner.
            conversation_id: The id of the conversation.
            after: The public id of a message; empty for the beginning, None for the current branch.
            hold: Called with the bytes of memory that the conversation takes, before it is read.
                Errors of `hold` are raised.

        Raises:
            NotFoundError: The caller has no such conversation, or the conversation has no such
                message.
        """
        key, user = row_id(conversation_id), owner_id(caller)

        async def work(connection: AsyncConnection) -> Branch:
            conversation = _require_found(await table.find_conversation(connection, user, key), conversation_id)
            count, size = await table.measure_messages(connection, key)
            hold(COPIES * (size + len((conversation.system_prompt or "").encode())) + MESSAGE_BYTES * count)
            return await self._branch(connection, conversation, after)

        return await self._read_long(caller, work)

    async def change(self, caller: Caller, conversation_id: str, **values: Any) -> Conversation:
        """Set columns of a conversation.

        Raises:
            NotFoundError: The caller has no such conversation.
            RateLimitError: The owner has no room for a longer system prompt or more metadata.
        """
        key, user = row_id(conversation_id), owner_id(caller)

        async def work(connection: AsyncConnection) -> Conversation:
            before = _require_found(await table.lock_conversation(connection, user, key), conversation_id)
            if grown := sum(
                len(values[name] or "") - len(getattr(before, name) or "")
                for name in ("system_prompt", "metadata")
                if name in values
            ):
                values["size"] = before.size + grown
                if grown > 0:
                    self._check_size(values["size"])
                    await self._check_room(connection, user, grown)
            await table.update_conversation(connection, key, **values)
            return _require_found(await table.find_conversation(connection, user, key), conversation_id)

        return await self._database.write(work, user)

    async def show_branch(self, caller: Caller, conversation_id: str, item_id: str) -> None:
        """Make the branch of the message `item_id` current, up to its most recent end.

        Raises:
            NotFoundError: The caller has no such conversation, or the conversation has no such
                message.
        """
        key, user = row_id(conversation_id), owner_id(caller)

        async def find_end(connection: AsyncConnection) -> str:
            _require_found(await table.find_conversation(connection, user, key), conversation_id)
            head = (await self._message(connection, key, item_id)).id
            newest = await table.newest_children(connection, key)
            while head in newest:
                head = newest.pop(head)  # A damaged parent may make a cycle.
            return head

        # Find the end before the transaction, in which other writers wait, and again if it is deleted meanwhile.
        end, shown = "", False
        while not shown:
            before, end = end, await self._read_long(caller, find_end)
            if end == before:
                raise _no_item(item_id)  # SQLite finds no row by a damaged id.
            show = partial(table.show_message, user_id=user, conversation_id=key, message_id=end)
            shown = await self._database.write(show, user)

    async def delete(self, caller: Caller, conversation_id: str) -> None:
        """Mark a conversation as deleted; its rows are purged later.

        Raises:
            NotFoundError: The caller has no such conversation.
        """
        key, user, now = row_id(conversation_id), owner_id(caller), self._now()
        deleted = await self._database.write(
            lambda connection: table.delete_conversation(connection, user, key, now), user
        )
        if not deleted:
            raise _no_conversation(conversation_id)

    # -- messages

    async def append(
        self,
        caller: Caller,
        conversation_id: str,
        messages: Sequence[NewMessage],
        after: str | None = None,
        answered: bool = False,
    ) -> Sequence[StoredMessage]:
        """Store messages after the message `after`.

        If `after` is None, the messages go to the end of the current branch. With `answered`, the
        messages have a generated answer, and are stored although the owner has no room.

        Raises:
            NotFoundError: The caller has no such conversation, or the conversation has no such
                message.
            InvalidRequestError: The conversation would exceed the maximum size.
            RateLimitError: The owner has no room for the messages.
        """
        key, user = row_id(conversation_id), owner_id(caller)

        async def work(connection: AsyncConnection) -> Sequence[StoredMessage]:
            conversation = _require_found(await table.lock_conversation(connection, user, key), conversation_id)
            head = await self._head(connection, conversation, after)
            if answered:
                self._take_room(user, _size(messages))
            else:
                await self._check_room(connection, user, _size(messages))
            if conversation.title is None and (title := make_title(messages)):
                await table.update_conversation(connection, key, title=title)
            return await self._append(connection, conversation, head, messages)

        return await self._database.write(work, user)

    async def message(self, caller: Caller, conversation_id: str, item_id: str) -> StoredMessage:
        """Return the message that has the item `item_id`.

        Raises:
            NotFoundError: The caller has no such conversation, or the conversation has no such
                item.
        """
        key, user = row_id(conversation_id), owner_id(caller)

        async def work(connection: AsyncConnection) -> StoredMessage:
            _require_found(await table.find_conversation(connection, user, key), conversation_id)
            return self._settled(await self._message(connection, key, item_id))

        return await self._read_long(caller, work)

    async def save(self, caller: Caller, conversation_id: str, message: StoredMessage) -> bool:
        """Store the current state of a message.

        Return False if the message or its conversation was deleted in the meantime.
        """
        key, user, now = row_id(conversation_id), owner_id(caller), self._now()
        self._take_room(user, message.size)
        return await self._database.write(lambda connection: table.update_message(connection, key, message, now), user)

    async def check_room(self, caller: Caller, size: int = 0) -> None:
        """Check that the owner may write `size` more characters.

        Raises:
            RateLimitError: The owner has the maximum size of conversations.
        """
        user = owner_id(caller)
        if not self._take_room(user, max(size, 1)):
            await self._database.read(lambda connection: self._check_room(connection, user, size), user)

    async def remove(self, caller: Caller, conversation_id: str, item_id: str) -> Conversation:
        """Delete one item of a conversation.

        Raises:
            NotFoundError: The caller has no such conversation, or the conversation has no such
                item.
        """
        key, user, now = row_id(conversation_id), owner_id(caller), self._now()

        async def work(connection: AsyncConnection) -> Conversation:
            conversation = _require_found(await table.lock_conversation(connection, user, key), conversation_id)
            message = await self._message(connection, key, item_id)
            left = [item for item in message_items(message) if item["id"] != item_id]
            if left:
                own = message.item_id if message.item_id != item_id else left[-1]["id"]
                kept = replace(message, item_id=own, items=json.dumps(left), content=searchable_text(left))
                await table.update_message(connection, key, kept, now)
            else:
                await table.delete_message(connection, conversation, message)
            return conversation

        return await self._database.write(work, user)

    async def _append(
        self, connection: AsyncConnection, conversation: Conversation, head: str | None, new: Sequence[NewMessage]
    ) -> Sequence[StoredMessage]:
        self._check_size(conversation.size + _size(new))
        count = await table.count_messages(connection, conversation.id) + len(new)
        if count > self.settings.conversation_messages:
            raise InvalidRequestError(
                f"The conversation would have {count:,} messages with all its branches, and at most "
                f"{self.settings.conversation_messages:,} are stored; start a new conversation.",
                code="conversation_full",
            )
        return await table.append_messages(connection, conversation, head, new, self._now())

    async def _check_room(self, connection: AsyncConnection, user: str, grown: int, new: int = 0) -> None:
        """Refuse `grown` characters and `new` conversations beyond the limits of an owner."""
        grown = max(grown, 1)  # an answer follows, or at least a row
        if not new and self._take_room(user, grown):
            return
        count, size = await table.count_conversations(connection, user)
        count, size = count + new, size + grown
        if (new and count > self.settings.entries) or size > self.settings.bytes:
            kept = "conversation" if count == 1 else "conversations"
            raise RateLimitError(
                f"You would have {count:,} {kept} with {size:,} characters, deleted ones included, and this "
                f"gateway keeps at most {self.settings.entries:,} with {self.settings.bytes:,}. A conversation that "
                f"is deleted is purged after {self.settings.purge_days} days. To delete all your conversations and "
                "responses for good now, send DELETE /api/conversations.",
                code="conversations_full",
                should_retry=False,
            )
        if len(self._room) >= MAX_ROOMS:
            self._room.clear()
        self._room[user] = (self.settings.bytes - size) // ROOM_SHARE

    def _take_room(self, user: str, size: int) -> bool:
        """Take room that is left since the last count. Return False if a count is necessary."""
        left = self._room.pop(user, 0) - size
        if left >= 0:
            self._room[user] = left
        return left >= 0

    def _check_size(self, size: int) -> None:
        if size > self.settings.conversation_bytes:
            raise InvalidRequestError(
                f"The conversation would have {size:,} characters, and at most "
                f"{self.settings.conversation_bytes:,} are stored; start a new conversation.",
                code="conversation_full",
            )

    def _settled(self, message: StoredMessage) -> StoredMessage:
        """Return the message, as incomplete if the gateway that generated it is lost."""
        lost = message.status == "in_progress" and message.written_at < self._now() - timedelta(seconds=LOST_AFTER)
        return replace(message, status="incomplete", finish_reason=GATEWAY_LOST) if lost else message

    # -- all conversations of an owner

    async def everything(
        self,
        caller: Caller,
        damaged: MutableSequence[str],
        tenant: str | None = None,
        user: str | None = None,
    ) -> AsyncIterator[Branch]:
        """Yield all conversations of the caller, a tenant or a user, with their current branch.

        Args:
            caller: The caller, whose conversations are yielded by default.
            damaged: Receives the public ids of unreadable conversations.
            tenant: The tenant whose conversations are yielded.
            user: The user whose conversations are yielded.
        """
        turn = owner_id(caller)
        owned = partial(table.conversation_ids, user_id=user or turn)
        ids = owned if tenant is None else partial(table.conversation_ids, tenant_id=tenant)

        async def read(connection: AsyncConnection, owner: str, key: str) -> Branch | None:
            conversation = await table.find_conversation(connection, owner, key)
            return None if conversation is None else await self._branch(connection, conversation)

        for owner, key in await self._database.read(ids, turn):
            try:
                branch = await self._read_long(caller, partial(read, owner=owner, key=key))
            except MALFORMED:
                damaged.append(_public_id(key))
                continue
            if branch is not None:
                found = [branch]
                del branch  # This frame must not keep the messages while a client reads their line.
                yield found.pop()

    async def purge(self, caller: Caller, tenant: str | None = None, user: str | None = None) -> int:
        """Permanently delete all conversations of the caller, a user or a tenant.

        Return the number of conversations.
        """
        work = partial(table.purge_user, user_id=user or owner_id(caller))
        if tenant is not None:
            work = partial(table.purge_tenant, tenant_id=tenant)
        purged = 0
        # Delete in batches, because the store must answer each query within its time limit.
        while found := await self._database.write(work, owner_id(caller)):
            purged += found
        return purged

    async def prune(
        self, archive: Callable[[Branch], None] | None = None, sync: Callable[[], None] = lambda: None
    ) -> int:
        """Purge conversations that were deleted long ago or have expired, and return their number.

        `archive` is called with each expired conversation, and `sync` in a thread before they are
        purged. An error of one of them ends the purge.
        """
        now, settings, purged = self._now(), self.settings, 0
        deleted = now - timedelta(days=settings.purge_days)
        while found := await self._database.write(partial(table.purge_deleted, before=deleted)):
            purged += found
        own = {name: one.days for name, one in settings.tenants.items() if one.days is not None}
        due = [(days, [name], False) for name, days in own.items()]
        if settings.days is not None:
            due.append((settings.days, list(own), True))
        for days, tenants, others in due:
            before = now - timedelta(days=days)
            damaged: list[str] = []
            inactive = partial(table.list_inactive, before=before, tenants=tenants, others=others, without=damaged)
            while ids := await self._database.read(inactive):
                if archive is not None:
                    damaged += [one for one in ids if not await self._archive(one, archive)]
                    await asyncio.to_thread(sync)
                archived = [one for one in ids if one not in damaged]
                found = await self._database.write(partial(table.purge_inactive, ids=archived, before=before))
                purged += found
                if archived and not found:
                    break  # SQLite finds no row by a damaged id; another gateway may have purged others.
        return purged

    async def _archive(self, conversation_id: str, archive: Callable[[Branch], None]) -> bool:
        """Archive a conversation that no user deleted. Return False if one of its rows is damaged."""

        async def read(connection: AsyncConnection) -> Branch | None:
            found = await table.read_conversation(connection, conversation_id)
            return None if found is None or found.deleted_at else await self._branch(connection, found)

        try:
            branch = await self._database.read(read)
            if branch is not None:
                archive(branch)
        except MALFORMED as error:
            reason = type(error).__name__
            log.error(
                "Conversation %s cannot be archived because a row is damaged (%s). The conversation is kept until the "
                "row is restored or deleted.",
                conversation_id,
                reason,
            )
            return False
        return True

    async def _read_long(self, caller: Caller, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        return await self._database.read_long(work, owner_id(caller), caller.share)

    async def _branch(
        self, connection: AsyncConnection, conversation: Conversation, after: str | None = None
    ) -> Branch:
        every = [self._settled(one) for one in await table.read_messages(connection, conversation.id)]
        return Branch(conversation, branch_path(every, await self._head(connection, conversation, after)), every)

    async def _head(self, connection: AsyncConnection, conversation: Conversation, after: str | None) -> str | None:
        if after is None:
            return conversation.head_id
        return (await self._message(connection, conversation.id, after)).id if after else None

    async def _message(self, connection: AsyncConnection, key: str, item_id: str) -> StoredMessage:
        # The ids of stored items are printable, and PostgreSQL refuses some texts that are not.
        for message in await table.find_messages(connection, key, item_id) if item_id.isprintable() else ():
            if message.item_id == item_id or any(item["id"] == item_id for item in message_items(message)):
                return message
        raise _no_item(item_id)


def owner_id(caller: Caller) -> str:
    """Return the UUID of the caller's owner.

    A user has a UUID. For a key that was not verified, the UUID is derived from the key's digest.
    """
    owner = caller.owner
    try:
        return str(UUID(owner or "0" * 32))
    except ValueError:
        return str(UUID(owner[:32]))


def row_id(conversation_id: str) -> str:
    """Return the UUID of a public id.

    Raises:
        NotFoundError: The text is not a public id.
    """
    if not _ID.fullmatch(conversation_id):
        raise _no_conversation(conversation_id)
    return str(UUID(conversation_id[5:]))


def public_id(conversation: Conversation) -> str:
    """Return the public id of a conversation."""
    return _public_id(conversation.id)


def _public_id(key: str) -> str:
    # Not parsed as a UUID, because the id of a damaged row may be none, nor a text.
    return f"conv_{str(key).replace('-', '')}"


def message_items(message: StoredMessage) -> list[dict[str, Any]]:
    """Return the items of the Responses API that represent a message."""
    if message.items is not None:
        found: list[dict[str, Any]] = json.loads(message.items)
        return found
    kind = "output_text" if message.role == "assistant" else "input_text"
    part: dict[str, Any] = {"type": kind, "text": message.content}
    if kind == "output_text":
        part.update(annotations=[], logprobs=[])
    head = {"type": "message", "id": message.item_id, "role": message.role, "status": message.status}
    return [{**head, "content": [part]}]


def message_from_item(item: dict[str, Any]) -> NewMessage:
    """Return a message for an item of the Responses API, which must have an id."""
    content = item.get("content")
    plain = item.get("type", "message") == "message" and isinstance(content, str)
    text = content if isinstance(content, str) else searchable_text([item])
    role = item.get("role") or ("tool" if item.get("type") == "function_call_output" else "assistant")
    status = "completed" if plain else str(item.get("status") or "completed")
    stored = None if plain else json.dumps([{"type": "message", "status": status, **item}])
    return NewMessage(item_id=item["id"], role=str(role)[:20], content=text, items=stored, status="completed")


def searchable_text(items: Sequence[dict[str, Any]]) -> str:
    """Return the text of the messages among `items`, for searches."""
    texts = []
    for item in items:
        content = item.get("content") if item.get("type", "message") == "message" else item.get("output")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts += [str(part.get("text") or "") for part in content if isinstance(part, dict)]
    return "".join(texts)


def make_title(messages: Sequence[NewMessage]) -> str | None:
    """Return the beginning of the first user message as a title, cut between two words.

    Return None without a user message.
    """
    said = next((one.content for one in messages if one.role == "user" and one.content.strip()), "")
    words = " ".join(said[: 20 * TITLE_LENGTH].split())
    if len(words) <= TITLE_LENGTH:
        return words or None
    return (words[:TITLE_LENGTH].rpartition(" ")[0] or words[:TITLE_LENGTH]) + "…"


def branch_path(every: Sequence[StoredMessage], head_id: str | None) -> list[StoredMessage]:
    """Return the messages from the beginning of the conversation to the message `head_id`.

    `every` has the messages of all branches.
    """
    known = {message.id: message for message in every}
    path: list[StoredMessage] = []
    while head_id is not None and head_id in known:
        path.append(known.pop(head_id))
        head_id = path[-1].parent_id
    return path[::-1]


def _size(messages: Sequence[NewMessage]) -> int:
    return sum(message.size for message in messages)


def _require_found(conversation: Conversation | None, conversation_id: str) -> Conversation:
    if conversation is None:
        raise _no_conversation(conversation_id)
    return conversation


def _no_conversation(conversation_id: str) -> NotFoundError:
    return NotFoundError(
        f"Conversation with id '{conversation_id}' not found: it does not exist, was deleted, or belongs to another "
        "key. Check the id and the key.",
        code="conversation_not_found",
    )


def _no_item(item_id: str) -> NotFoundError:
    return NotFoundError(f"The conversation has no item with id '{item_id}'; send the id of one of its items.")
