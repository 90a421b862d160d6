"""Conversations: kept in order, each owner's own, deleted in two steps; on both databases."""

import asyncio
import gc
import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from unittest.mock import Mock
from uuid import uuid4

import pytest
from sqlalchemy import event, func, select

from llmops.clocks import utc_now
from llmops.control.retention import prune_expired
from llmops.gateway.api.conversations import _lines
from llmops.gateway.conversations.conversation_store import COPIES, ConversationStore, public_id
from llmops.gateway.conversations.purge import PurgeTask
from llmops.gateway.errors import InvalidRequestError, NotFoundError, RateLimitError
from llmops.gateway.interfaces import Caller
from llmops.gateway.settings import ConversationSettings
from llmops.store import conversations as table
from llmops.store.audit import AuditContext, record_action
from llmops.store.conversations import NewMessage, StoredMessage
from llmops.store.factory import open_store
from llmops.store.tables import conversations, messages
from tests.support.waiting import Clock, eventually

ANN = Caller(tenant_id="acme", user_id=str(uuid4()))
BOB = Caller(tenant_id="acme", user_id=str(uuid4()))
EVE = Caller(tenant_id="other", user_id=str(uuid4()))
ANSWER = {"role": "assistant", "content": "Hé 👋", "token_count": 4, "model": "smollm2", "finish_reason": "stop"}
PAIR = [NewMessage(item_id="msg_1", role="user", content="Hello?"), NewMessage(item_id="msg_2", **ANSWER)]


@pytest.fixture
def clock(by):
    return Clock(by.at)


@pytest.fixture
async def chats(url, clock):
    made = ConversationStore(url, ConversationSettings(), clock)
    yield made
    await made.close()


@pytest.mark.parametrize("kind", ["postgresql"])  # SQLite has one writer
async def test_changes_of_one_conversation_hold_up_no_other_owner(chats, url):
    """Before the fix, changes that waited for their turn had all connections, and others waited 5 s or failed."""
    anns, eves = await chats.create(ANN), await chats.create(EVE)
    async with await open_store(url) as store, store.write() as connection:
        await table.lock_conversation(connection, ANN.user_id, anns.id)
        waiting = [asyncio.create_task(chats.change(ANN, public_id(anns), title="Ann's")) for _ in range(40)]
        await asyncio.sleep(0.1)
        changed = await asyncio.wait_for(chats.change(EVE, public_id(eves), title="Eve's"), 4)
    assert (changed.title, {one.title for one in await asyncio.gather(*waiting)}) == ("Eve's", {"Ann's"})


async def ids(chats, caller, **query):
    found, _ = await chats.list(caller, limit=100, **query)
    return [public_id(one) for one in found]


async def plan_of_list(store, text):
    """The database's plan of a page of the list, as it would be with many rows."""
    ran = []
    async with store.read() as connection:
        sqlite = connection.dialect.name == "sqlite"
        event.listen(connection.sync_connection, "before_cursor_execute", lambda *call: ran.append(call[2:4]))
        await table.list_conversations(connection, ANN.user_id, text=text)
        statement, parameters = ran[-1]
        for scan in () if sqlite else ("seqscan", "bitmapscan"):
            await connection.exec_driver_sql(f"SET enable_{scan} = off")
        explain = "EXPLAIN QUERY PLAN " if sqlite else "EXPLAIN "
        rows = (await connection.exec_driver_sql(explain + statement, parameters)).all()
        if not sqlite:
            await connection.exec_driver_sql("RESET ALL")
    return "\n".join(str(row[-1]) for row in rows)


async def counted(store):
    async with store.read() as connection:
        return [await connection.scalar(select(func.count()).select_from(one)) for one in (conversations, messages)]


async def test_a_search_finds_what_titles_and_messages_contain(chats, clock, monkeypatch):
    said = replace(PAIR[0], content="A half is 50% of_it, said Ann.")
    old = public_id(await chats.create(ANN, [said], title="Sums"))
    clock.now += timedelta(days=1)
    new = public_id(await chats.create(ANN, PAIR))
    for text, found in (
        ("50% OF_IT, SAID", [old]), ("50% of it, said", []), ("5_", []), ("sUm", [old]), ("hé", [new]),
        ("l", [new, old]),
    ):  # fmt: skip
        assert await ids(chats, ANN, text=text) == found, text
        assert await ids(chats, BOB, text=text) == []
    # of more than can be read in time, the newest conversations are searched, and all titles
    monkeypatch.setattr(table, "SEARCH_SIZE", 5)
    assert [await ids(chats, ANN, text=text) for text in ("50%", "hello", "sums")] == [[], [new], [old]]


async def test_searches_leave_connections_to_lists(chats, monkeypatch):
    """Before the fix, twenty searches had all connections and cores: a list took 0.5 to 2 s of PostgreSQL's time."""
    listed, over, running = table.list_conversations, asyncio.Event(), []

    async def search_slowly(connection, user, text=None, **options):
        if text:
            running.append(user)
            await over.wait()
        return await listed(connection, user, text=text, **options)

    monkeypatch.setattr(table, "list_conversations", search_slowly)
    owners = [Caller(tenant_id="acme", user_id=str(uuid4())) for _ in range(20)]
    searches = [asyncio.create_task(chats.list(one, limit=5, text="fox")) for one in owners]
    await eventually(lambda: running)
    assert await asyncio.wait_for(chats.list(ANN, limit=5), 4) == ([], False)
    assert len(running) <= 2
    over.set()
    assert await asyncio.gather(*searches) == [([], False)] * 20


async def test_tenants_take_turns_to_read_conversations(chats, monkeypatch):
    """Before the fix, 16 keys that read conversations of 4,000 messages kept other tenants waiting for 3.8 s."""
    read, running, order = table.read_messages, [], []

    async def read_slowly(connection, conversation):
        order.append(conversation)
        running.append(conversation)
        assert len(running) <= 2
        await asyncio.sleep(0.02)
        running.remove(conversation)
        return await read(connection, conversation)

    monkeypatch.setattr(table, "read_messages", read_slowly)
    owners = [Caller(tenant_id="other", user_id=str(uuid4()), share=f"other/{at}") for at in range(20)]
    owners.append(replace(ANN, share="acme/ann"))
    made = [await chats.create(one) for one in owners]
    await asyncio.gather(*(chats.read(one, public_id(own)) for one, own in zip(owners, made, strict=True)))
    assert order.index(made[-1].id) <= 3


async def test_changes_of_branches_keep_no_writer_waiting(chats, clock, url, monkeypatch):
    """Before the fix, four users who changed branches of 4,000 messages kept chats of others waiting for 3 s."""
    newest, over, running = table.newest_children, asyncio.Event(), []

    async def read_slowly(connection, conversation):
        running.append(conversation)
        await over.wait()
        return await newest(connection, conversation)

    monkeypatch.setattr(table, "newest_children", read_slowly)
    owners = [Caller(tenant_id="acme", user_id=str(uuid4())) for _ in range(5)]
    made = [public_id(await chats.create(one, PAIR)) for one in owners]
    anns, other = public_id(await chats.create(ANN)), ConversationStore(url, ConversationSettings(), clock)
    pairs = list(zip(owners, made, strict=True))
    changes = [asyncio.create_task(chats.show_branch(one, own, "msg_1")) for one, own in pairs]
    await eventually(lambda: len(running) == 2)
    assert (await asyncio.wait_for(chats.change(ANN, anns, title="Ann's"), 4)).title == "Ann's"
    assert len(running) == 2
    await other.remove(owners[0], made[0], "msg_2")  # at another gateway, after the end of the branch was read
    over.set()
    await asyncio.gather(*changes)
    shown = [[one.item_id for one in (await chats.read(*pair)).messages] for pair in pairs]
    assert shown == [["msg_1"], *([["msg_1", "msg_2"]] * 4)]
    await other.close()


async def test_other_requests_run_while_many_messages_are_decoded(chats, monkeypatch):
    """Before the fix, a read of 4,000 messages blocked the event loop for 60 ms."""
    turn, decoded = 0, Counter()

    async def take_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    new = [NewMessage(item_id=f"msg_{at}", role="user", content="Hello?") for at in range(1000)]
    own = public_id(await chats.create(ANN, new))
    monkeypatch.setattr(table, "StoredMessage", lambda **row: decoded.update([turn]) or StoredMessage(**row))
    other = asyncio.create_task(take_turns())
    assert len((await chats.read(ANN, own)).messages) == 1000
    other.cancel()
    assert max(decoded.values()) <= 200


async def test_an_item_is_found_by_its_id_without_the_texts_of_other_messages(chats, monkeypatch):
    """Before the fix, a change of the branch held the whole conversation while it waited to write."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "é\\"}'}
    items = json.dumps([{"id": "fc_1", **call}, {"id": 'fc"é\\', **call}])
    texts = [{"item_id": f"msg_{at}", "content": f'"fc_1" {at}' * 1000, "role": "user"} for at in range(3)]
    new = [*(NewMessage(**one) for one in texts), NewMessage(item_id="fc_2", role="assistant", content="", items=items)]
    own = public_id(await chats.create(ANN, new))
    with monkeypatch.context() as patched:
        patched.setattr(table, "read_messages", Mock(side_effect=AssertionError))
        found = [(await chats.message(ANN, own, one)).item_id for one in ("msg_1", "fc_1", 'fc"é\\', "fc_2")]
        assert found == ["msg_1", "fc_2", "fc_2", "fc_2"]
        for unknown in ("fc_", "", "user", "é\\", "\0", "\ud800", "x" * 200):
            with pytest.raises(NotFoundError):
                await chats.message(ANN, own, unknown)
        await chats.append(ANN, own, [NewMessage(item_id="msg_3", role="user", content="Hm.")], after="msg_0")
        await chats.show_branch(ANN, own, "msg_1")
        await chats.remove(ANN, own, "fc_1")
    assert [one.item_id for one in (await chats.read(ANN, own)).messages] == ["msg_0", "msg_1", "msg_2", "fc_2"]
    await chats.show_branch(ANN, own, "msg_0")
    read = await chats.read(ANN, own)
    assert [one.item_id for one in read.messages] == ["msg_0", "msg_3"]
    assert [item["id"] for one in read.every for item in json.loads(one.items or "[]")] == ['fc"é\\']


async def test_a_message_without_its_last_item_has_the_id_of_the_one_before(chats):
    """Before the fix, GET of the deleted item answered 500."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = json.dumps([{"id": "fc_1", **call}, {"id": "fc_2", **call}])
    own = public_id(await chats.create(ANN, [NewMessage(item_id="fc_2", role="assistant", content="", items=items)]))
    await chats.remove(ANN, own, "fc_2")
    with pytest.raises(NotFoundError):
        await chats.message(ANN, own, "fc_2")
    assert (await chats.message(ANN, own, "fc_1")).item_id == "fc_1"


@pytest.mark.parametrize("text", [None, "fox"])
async def test_a_page_of_the_list_is_read_in_the_order_of_its_index(store, text):
    """A page of 10,000 conversations reads its own rows only, and sorts none."""
    plan = await plan_of_list(store, text)
    assert "idx_conversations_user" in plan, plan
    assert "FOR ORDER BY" not in plan, plan
    assert ("idx_messages_" in plan) == (text is not None), plan


async def test_a_deleted_conversation_is_purged_after_thirty_days(chats, clock, store):
    kept, gone = [public_id(await chats.create(ANN, PAIR)) for _ in range(2)]
    await chats.delete(ANN, gone)
    assert await ids(chats, ANN) == [kept]
    clock.now += timedelta(days=29.9)
    assert await chats.prune() == 0
    clock.now += timedelta(days=0.2)
    assert (await chats.prune(), await counted(store)) == (1, [1, 2])


@pytest.mark.parametrize("kind", ["postgresql"])  # SQLite has no clock of its own
async def test_a_gateway_whose_clock_is_ahead_purges_nothing_too_early(chats, clock, store, monkeypatch):
    clock.now = utc_now()
    await chats.delete(ANN, public_id(await chats.create(ANN, PAIR)))
    ahead = Clock(utc_now() + timedelta(days=60))
    monkeypatch.setattr("llmops.store.columns.utc_now", ahead)
    async with store.write() as connection:
        await record_action(connection, AuditContext("cli:ann", utc_now()), "key.create", "key-1")
    clock.now = ahead()
    assert await chats.prune() == 0
    assert await prune_expired(store, ahead(), timedelta(days=30)) == (0, 0)


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_answers_of_a_gateway_whose_clock_is_behind_are_not_lost(url, clock, monkeypatch):
    """Before the fix, others showed them as those of a lost gateway, and deleted their conversation for its age."""
    chats = ConversationStore(url, ConversationSettings(days=1, purge_days=1))
    with monkeypatch.context() as patch:
        clock.now = utc_now() - timedelta(days=3)
        patch.setattr("llmops.store.columns.utc_now", clock)
        behind = ConversationStore(url, ConversationSettings(), clock)
        talk = public_id(await behind.create(ANN, PAIR))
        running = NewMessage(item_id="msg_3", role="assistant", content="", status="in_progress")
        (row,) = await behind.append(ANN, talk, [running])
        assert await behind.save(ANN, talk, row)
        assert (await behind.read(ANN, talk)).messages[-1].status == "in_progress"
        await behind.delete(ANN, public_id(await behind.create(ANN, PAIR)))
        await behind.close()
    assert (await chats.read(ANN, talk)).messages[-1].status == "in_progress"
    assert await chats.prune() == 0
    await chats.close()


async def test_who_has_deleted_all_conversations_learns_why_there_is_no_room_and_how_to_make_some(url, clock):
    """Before the fix, owners without a conversation were told to delete some, for 30 days."""
    chats = ConversationStore(url, ConversationSettings(entries=1), clock)
    await chats.delete(ANN, public_id(await chats.create(ANN, PAIR)))
    count = r"You would have 2 conversations with 526 characters, deleted ones included, .* at most 1 with"
    way = r"deleted is purged after 30 days. To delete .* for good now, send DELETE /api/conversations\.$"
    with pytest.raises(RateLimitError, match=f"{count}.*{way}"):
        await chats.create(ANN)
    await chats.purge(ANN)
    await chats.create(ANN)
    await chats.close()


async def test_conversations_that_grow_stay_within_the_limit_of_their_owner(url, clock, store):
    """Before the fix, conversations that were made empty held up to `conversation_bytes` each."""
    settings = ConversationSettings(bytes=4112, entries=20)
    chats, other = (ConversationStore(url, settings, clock) for _ in range(2))
    talks = [public_id(await chats.create(ANN)) for _ in range(20)]
    text = [NewMessage(item_id="msg_1", role="user", content="x" * 90)]
    done = await asyncio.gather(*(chats.append(ANN, one, text) for one in talks), return_exceptions=True)
    assert [getattr(one, "code", None) for one in done] == [None] * 11 + ["conversations_full"] * 9
    with pytest.raises(RateLimitError):
        await other.append(ANN, talks[0], text)
    with pytest.raises(RateLimitError, match="20 conversations with 4,113 characters"):
        await chats.change(ANN, talks[0], system_prompt="x" * 267)
    (row,) = await chats.append(ANN, talks[0], [replace(text[0], content="")])
    assert await chats.save(ANN, talks[0], replace(row, content="x" * 1000))  # an answer that was generated
    for new in [replace(text[0], content="")], text:
        with pytest.raises(RateLimitError):
            await chats.append(ANN, talks[1], new)
    await chats.append(ANN, talks[1], text, answered=True)
    await chats.change(ANN, talks[1], title="Renamed")
    await chats.append(EVE, public_id(await chats.create(EVE)), text)
    await chats.purge(ANN)
    await chats.append(ANN, public_id(await chats.create(ANN)), text)
    await asyncio.gather(chats.close(), other.close())


async def test_metadata_and_empty_messages_count_against_the_limits_of_an_owner(url, clock):
    """Before the fix, 20,000 conversations held 190 MB of metadata, and 80 million empty messages."""
    chats = ConversationStore(url, ConversationSettings(bytes=1000, conversation_bytes=700), clock)
    full = {"metadata": {"note": "x" * 490}}
    talk, empty = public_id(await chats.create(ANN, **full)), public_id(await chats.create(ANN))
    with pytest.raises(RateLimitError):
        await chats.create(ANN, **full)
    with pytest.raises(RateLimitError):
        await chats.change(ANN, empty, metadata=json.dumps(full))
    message = NewMessage(item_id="msg_1", role="user", content="")
    with pytest.raises(RateLimitError):
        await chats.append(ANN, empty, 2 * [message])
    with pytest.raises(InvalidRequestError):
        await chats.append(ANN, talk, [message])
    await chats.change(ANN, talk, metadata="{}")
    await chats.append(ANN, empty, 2 * [message])
    await chats.remove(ANN, empty, "msg_1")
    await chats.append(ANN, talk, 2 * [message])
    await chats.close()


async def test_the_conversations_of_an_owner_are_counted_once_for_many_writes(chats, monkeypatch):
    talk, counted = public_id(await chats.create(ANN)), Mock(wraps=table.count_conversations)
    monkeypatch.setattr(table, "count_conversations", counted)
    for _ in range(50):
        (row,) = await chats.append(ANN, talk, PAIR[:1])
        await chats.save(ANN, talk, row)
        await chats.check_room(ANN, 1000)
    assert counted.call_count == 0
    await chats.append(ANN, talk, [replace(PAIR[0], content="x" * 4_000_000)])
    assert counted.call_count == 1


async def test_each_tenant_keeps_conversations_for_its_own_time(url, clock, store):
    chats = ConversationStore(url, ConversationSettings(days=100, tenants={"acme": {"days": 10}}), clock)
    for caller in (ANN, EVE):
        await chats.create(caller, PAIR)
    clock.now += timedelta(days=11)
    await chats.prune()
    assert (await ids(chats, ANN), len(await ids(chats, EVE))) == ([], 1)
    clock.now += timedelta(days=90)
    await chats.prune()
    assert await counted(store) == [0, 0]
    await chats.close()


async def test_what_is_deleted_for_its_age_is_archived_first(url, clock, tmp_path, monkeypatch):
    """Before the fix, a power cut soon after the purge lost what only the system's memory had of the archive."""
    chats = ConversationStore(url, ConversationSettings(days=10), clock)
    old, gone = [public_id(await chats.create(ANN, PAIR)) for _ in range(2)]
    await chats.delete(ANN, gone)
    clock.now += timedelta(days=11)
    (tmp_path / "file").write_text("")

    async def opened():
        return chats

    with pytest.raises(OSError, match="file"):
        await PurgeTask(opened, tmp_path / "file" / "archive").purge()
    assert await ids(chats, ANN) == [old]
    purge = PurgeTask(opened, tmp_path / "archive")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", Mock(side_effect=OSError("no disk")))
        with pytest.raises(OSError, match="no disk"):
            await purge.purge()
    assert await ids(chats, ANN) == [old]
    (archived,) = (tmp_path / "archive").iterdir()
    archived.unlink()
    # what its user deleted is purged too, and is not kept anywhere
    assert await purge.purge() == 2
    (file,) = (tmp_path / "archive").iterdir()
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["id"], [one["content"] for one in line["messages"]]) == (old, ["Hello?", "Hé 👋"])
    assert file.stat().st_mode & 0o777 == 0o600
    assert await purge.purge() == 0
    await chats.close()


async def test_a_conversation_that_is_read_is_held_by_its_bytes(chats):
    """Before the fix, its characters were counted, of which an emoji is one and has four bytes."""
    held: list[int] = []
    for text in ("Hé 👋", "Hi"):
        new = NewMessage(item_id="msg_1", role="user", content=text, items=json.dumps([text], ensure_ascii=False))
        conversation = await chats.create(ANN, [new, *PAIR], system_prompt=text)
        await chats.read(ANN, public_id(conversation), hold=held.append)
    assert held[0] - held[1] == COPIES * 3 * (len("Hé 👋".encode()) - len("Hi"))


async def test_an_export_keeps_no_messages_while_a_client_reads_their_line(chats):
    """Before the fix, 600 readers of 8 MB who did not read held 9 conversations besides their lines: 69 of 246 MiB."""
    await chats.create(ANN, [NewMessage(item_id="msg_1", role="user", content="of a paused export")])
    branches = chats.everything(ANN, [])
    lines = _lines(branches, branches, [], lambda size: None)
    assert b"of a paused export" in await anext(lines)
    kept = [one.content for one in gc.get_objects() if isinstance(one, StoredMessage)]
    assert "of a paused export" not in kept


async def test_everything_of_a_user_or_of_a_tenant_is_exported_and_deleted(chats, store):
    for caller in (ANN, ANN, BOB, EVE):
        await chats.create(caller, PAIR)
    assert [len(one.messages) async for one in chats.everything(ANN, [])] == [2, 2]
    assert len([one async for one in chats.everything(EVE, [], "acme")]) == 3
    assert len([one async for one in chats.everything(EVE, [], user=ANN.user_id)]) == 2
    assert (await chats.purge(EVE, user=ANN.user_id), await chats.purge(EVE, "acme")) == (2, 1)
    assert await counted(store) == [1, 2]


async def test_large_conversations_are_purged_one_by_one(chats, store, clock, monkeypatch):
    """One statement for 50 of 8 MB held up all other writers of an SQLite file for two seconds."""
    monkeypatch.setattr(table, "PURGE_SIZE", 15)
    for _ in range(3):
        await chats.create(ANN, PAIR)
    async with store.write() as connection:
        assert await table.purge_user(connection, ANN.user_id) == 1
    clock.now += timedelta(days=9)
    async with store.write() as connection:
        assert len(await table.list_inactive(connection, clock.now, [], others=True)) == 1
        assert await table.purge_deleted(connection, clock.now) == 0
    assert await chats.purge(ANN) == 2


async def test_an_answer_whose_gateway_was_killed_is_partial(chats, clock):
    made = public_id(await chats.create(ANN))
    await chats.append(ANN, made, [PAIR[0], replace(PAIR[1], status="in_progress", content="Hé")])
    assert (await chats.read(ANN, made)).messages[-1].status == "in_progress"
    clock.now += timedelta(seconds=11)
    lost = (await chats.read(ANN, made)).messages[-1]
    assert (lost.status, lost.finish_reason, lost.content) == ("incomplete", "gateway_lost", "Hé")
