"""Conversations: kept in order, each user's own, deleted in two steps; on both databases."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import func, select

from llmops.errors import InputError
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.conversations import (
    NewMessage,
    append_messages,
    create_conversation,
    delete_conversation,
    get_conversation,
    list_conversations,
    purge_conversations,
)
from llmops.store.tables import messages

PAIR = [NewMessage("user", "Hello?"), NewMessage("assistant", "Hé 👋", 4, "smollm2", "stop", 212)]


async def people(connection, by):
    await create_tenant(connection, "acme", Limits(), by)
    return [(await ensure_user(connection, "acme", f"{name}@acme.example", by)).id for name in ("ann", "bob")]


async def test_what_was_said_comes_back_in_order(store, by):
    async with store.write() as connection:
        ann, _ = await people(connection, by)
        chat = await create_conversation(connection, ann, "smollm2", by.at, "t" * 501, "Be brief.")
        for turn in range(3):
            assert await append_messages(connection, ann, chat.id, PAIR, by.at + timedelta(seconds=turn))
        assert await append_messages(connection, ann, chat.id, [], by.at + timedelta(seconds=9))
    async with store.read() as connection:
        found, said = await get_conversation(connection, ann, chat.id)
    assert (found.title, found.model, found.system_prompt) == ("t" * 500, "smollm2", "Be brief.")
    assert (found.created_at, found.updated_at) == (by.at, by.at + timedelta(seconds=9))
    assert [(one.role, one.content) for one in said] == [("user", "Hello?"), ("assistant", "Hé 👋")] * 3
    answer = said[1]
    assert (answer.token_count, answer.model, answer.finish_reason, answer.latency_ms) == (4, "smollm2", "stop", 212)


async def test_another_users_conversation_is_not_there(store, by):
    async with store.write() as connection:
        ann, bob = await people(connection, by)
        chat = await create_conversation(connection, ann, "smollm2", by.at)
        for not_mine in (chat.id, str(uuid4()), "1", "' OR 1=1 --"):
            assert await get_conversation(connection, bob, not_mine) is None
            assert not await append_messages(connection, bob, not_mine, PAIR, by.at)
            assert not await delete_conversation(connection, bob, not_mine, by.at)
        assert await list_conversations(connection, bob) == []
        found, said = await get_conversation(connection, ann, chat.id)
    assert (found, said) == (chat, [])


async def test_the_list_goes_page_by_page_from_the_last_spoken_in(store, by):
    async with store.write() as connection:
        ann, _ = await people(connection, by)
        # pairs with the same time
        chats = [
            await create_conversation(connection, ann, "m", by.at + timedelta(seconds=place // 2)) for place in range(7)
        ]
        await append_messages(connection, ann, chats[0].id, PAIR, by.at + timedelta(minutes=1))
        pages, before = [], None
        while page := await list_conversations(connection, ann, 2, before):
            pages.append(page)
            before = page[-1]
    listed = [one for page in pages for one in page]
    assert [len(page) for page in pages] == [2, 2, 2, 1]
    assert listed[0].id == chats[0].id
    assert {one.id for one in listed} == {one.id for one in chats}
    assert [one.updated_at for one in listed] == sorted((one.updated_at for one in listed), reverse=True)


async def test_a_deleted_conversation_is_gone_at_once_and_purged_later(store, by):
    month = timedelta(days=30)
    async with store.write() as connection:
        ann, _ = await people(connection, by)
        gone, kept = [await create_conversation(connection, ann, "m", by.at) for _ in range(2)]
        for chat in (gone, kept):
            await append_messages(connection, ann, chat.id, PAIR, by.at)
        assert await delete_conversation(connection, ann, gone.id, by.at)
        assert not await delete_conversation(connection, ann, gone.id, by.at)
        assert await get_conversation(connection, ann, gone.id) is None
        assert not await append_messages(connection, ann, gone.id, PAIR, by.at)
        assert [one.id for one in await list_conversations(connection, ann)] == [kept.id]
        assert await purge_conversations(connection, by.at) == 0
        assert await connection.scalar(select(func.count()).select_from(messages)) == 4
        assert await purge_conversations(connection, by.at + month) == 1
        assert await connection.scalar(select(func.count()).select_from(messages)) == 2
        assert (await get_conversation(connection, ann, kept.id))[1]


async def test_a_name_that_does_not_fit_is_refused(store, by):
    async with store.write() as connection:
        ann, _ = await people(connection, by)
        with pytest.raises(InputError, match="at most 50 characters"):
            await create_conversation(connection, ann, "m" * 51, by.at)
