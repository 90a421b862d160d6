"""Stored responses are bounded, fair between owners, and found by their owner only, in memory and in a store alike."""

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from llmops.clocks import utc_now
from llmops.gateway.conversations.response_store import MemoryResponses, StoredResponse
from llmops.gateway.conversations.sql_responses import SqlResponses
from llmops.gateway.conversations.stored_context import StoredContext
from llmops.gateway.errors import ContextLengthError, InvalidRequestError, NotFoundError
from llmops.gateway.settings import RequestLimits, ResponseStoreSettings
from llmops.store import responses as table
from llmops.store.factory import open_store
from tests.support.accounts import add_key
from tests.support.waiting import eventually


def entry(name, owner="me", before=None, text="x", running=False):
    output = [{"type": "message", "id": f"out_{name}", "role": "assistant", "content": text}]
    response = {"id": name, "output": output, "previous_response_id": before, "status": "completed"}
    return StoredResponse(owner, response, [{"role": "user", "content": name, "id": f"in_{name}"}], [[1]], running)


class Clock:
    """Moves on by a second each time that it is asked, so that no two writes are at the same time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds

    def now(self) -> datetime:
        return datetime(2026, 11, 23, tzinfo=UTC) + timedelta(seconds=self())


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def kind(request):
    return request.param


@pytest.fixture
def opened(kind, request):
    url = "" if kind == "memory" else request.getfixturevalue("url")

    @asynccontextmanager
    async def open_(clock=None, **limits):
        clock, limits = clock or Clock(), ResponseStoreSettings(**limits)
        store = MemoryResponses(limits, clock) if kind == "memory" else SqlResponses(url, limits, clock.now)
        yield store
        await store.close()

    return open_


async def put(store, *entries):
    for one in entries:
        assert await store.put(one.to_row())


async def context(store, previous=None, own=(), owner="me", hold=lambda size: None, **limits):
    return await StoredContext(store, owner, RequestLimits(**limits), hold).items(list(own), previous)


def reference(item_id):
    return {"type": "item_reference", "id": item_id}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_reads_of_an_owner_leave_connections_to_others(opened, monkeypatch):
    """Before the fix, 60 connections of a key that read a response kept others' responses waiting for 2.4 s."""
    find, over, running = table.find_response, asyncio.Event(), []

    async def find_slowly(connection, response_id, owner, since):
        running.append(owner)
        if owner == "me":
            await over.wait()
        return await find(connection, response_id, owner, since)

    monkeypatch.setattr(table, "find_response", find_slowly)
    async with opened() as store:
        await put(store, entry("a"), entry("b", "you"))
        reads = [asyncio.create_task(store.find("a", "me")) for _ in range(20)]
        await eventually(lambda: running)
        assert (await asyncio.wait_for(store.find("b", "you"), 4)).id == "b"
        assert running == ["me", "you"]
        over.set()
        assert {one.id for one in await asyncio.gather(*reads)} == {"a"}


async def test_what_is_found_is_what_was_put(opened):
    async with opened() as store:
        kept = entry("a", text='é"\x00')
        await put(store, kept)
        assert (await store.find("a", "me")).decoded() == kept
        await put(store, entry("a", text="z"))
        assert (await store.find("a", "me")).decoded() == entry("a", text="z")


async def test_context_is_the_whole_conversation_in_order(opened):
    async with opened() as store:
        await put(store, entry("a"), entry("b", before="a"), entry("c", before="b"))
        items = await context(store, "c")
    assert [item["id"] for item in items] == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]


async def test_a_reference_costs_what_it_brings_each_time(opened):
    held = []
    async with opened() as store:
        await put(store, entry("a", text="y" * 1000))
        items = await context(store, own=[reference("out_a")] * 3, hold=held.append)
        assert [len(item["content"]) for item in items] == [1000] * 3
        assert sum(held) > 3000
        with pytest.raises(ContextLengthError):
            await context(store, own=[reference("out_a")] * 2000, prompt_bytes=1000)
        with pytest.raises(InvalidRequestError, match="JSON values"):
            await context(store, own=[reference("out_a")] * 300, json_values=1000)
        with pytest.raises(NotFoundError):
            await context(store, own=[reference("out_b")])


async def test_a_chain_is_measured_before_it_is_read(opened, monkeypatch):
    async with opened() as store:
        await put(store, entry("0", text="y" * 100_000))
        for at in range(1, 30):
            await put(store, entry(str(at), before=str(at - 1), text="y" * 100_000))
        assert len(await context(store, "5")) == 12

        async def read(*_):
            raise AssertionError("nothing of it may be read")

        monkeypatch.setattr(StoredContext, "_entry", read)
        with pytest.raises(ContextLengthError, match="characters"):
            await context(store, "29", prompt_bytes=1_000_000)


async def test_age_is_bounded(opened):
    clock = Clock()
    async with opened(clock, age="100s") as store:
        await put(store, entry("a"))
        clock.seconds += 200
        assert await store.find("a", "me") is None
        with pytest.raises(NotFoundError):
            await context(store, own=[reference("out_a")])
        with pytest.raises(NotFoundError):
            await context(store, "a")


async def test_number_and_size_are_bounded_and_the_newest_stays(opened):
    async with opened(entries=5) as store:
        await put(store, *(entry(f"r{at}") for at in range(20)))
        found = [at for at in range(20) if await store.find(f"r{at}", "me")]
    assert found == [15, 16, 17, 18, 19]


async def test_an_owner_evicts_its_own_responses(opened):
    async with opened(bytes=20_000) as store:
        await put(store, *(entry(f"mine{at}", text="y" * 1_000) for at in range(5)))
        await put(store, *(entry(f"yours{at}", owner="you", text="y" * 5_000) for at in range(50)))
        assert all([await store.find(f"mine{at}", "me") for at in range(5)])
        assert await store.find("yours49", "you")
        assert await store.find("yours0", "you") is None


async def test_owners_do_not_see_each_other(opened):
    async with opened() as store:
        await put(store, entry("a"))
        assert await store.find("a", "you") is None
        assert not await store.delete("a", "you")
        with pytest.raises(NotFoundError):
            await context(store, "a", owner="you")
        with pytest.raises(NotFoundError):
            await context(store, own=[reference("out_a")], owner="you")
        # an item id that another owner chose as well
        await put(store, entry("b", owner="you"))
        taken = entry("c", owner="you")
        taken.items[0]["id"] = "in_a"
        await put(store, taken)
        assert (await context(store, own=[reference("in_a")]))[0]["content"] == "a"
        assert await store.delete("a", "me")
        with pytest.raises(NotFoundError):
            await context(store, own=[reference("out_a")])


async def test_a_later_state_neither_revives_nor_restarts_a_response(opened):
    async with opened() as store:
        await put(store, entry("a", running=True))
        assert await store.put(entry("a", text="more", running=True).to_row(), new=False)
        assert await store.put(entry("a", text="all").to_row(), new=False)
        assert (await store.find("a", "me")).decoded() == entry("a", text="all")
        assert await store.delete("a", "me")
        assert not await store.put(entry("a").to_row(), new=False)
        assert await store.find("a", "me") is None


async def test_what_began_before_its_owner_deleted_everything_is_not_stored(opened):
    before, after = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
    async with opened() as store:
        await put(store, entry("a"))
        await store.delete_all("me")
        assert not await store.put(entry("b").to_row(before))
        assert await store.list("me") == []
        assert await store.put(entry("c").to_row(after))
        assert await store.put(entry("d", "you").to_row(before))


@pytest.mark.parametrize("kind", ["postgresql"])  # SQLite has no clock of its own
async def test_responses_of_a_gateway_whose_clock_is_behind_are_kept_and_deleted(url, monkeypatch):
    """Before the fix, none was found elsewhere, the next write deleted them, and some outlived their deletion."""
    limits = ResponseStoreSettings()
    store = SqlResponses(url, limits)

    def behind() -> datetime:
        return utc_now() - timedelta(days=2)

    other = SqlResponses(url, limits, behind)
    with monkeypatch.context() as patch:
        patch.setattr("llmops.store.columns.utc_now", behind)
        await put(other, entry("a", running=True))
        assert (await other.find("a", "me")).age < 60
    await put(store, entry("b"))
    assert (await store.find("a", "me")).age < 60
    assert await store.find_items(["out_a"], "me")
    began = utc_now()
    with monkeypatch.context() as patch:
        patch.setattr("llmops.store.columns.utc_now", behind)
        await other.delete_all("me")
    assert not await store.put(entry("c").to_row(began))
    assert await store.list("me") == []
    for one in (store, other):
        await one.close()


async def test_deleting_everything_of_a_tenant_deletes_what_its_users_have_and_begin(url):
    async with await open_store(url) as accounts:
        users = [(await add_key(accounts, tenant))[2] for tenant in ("acme", "zeta")]
    store = SqlResponses(url, ResponseStoreSettings(), Clock().now)
    await put(store, *(entry(f"a-{user}", user) for user in users))
    await store.delete_all("", "acme")
    began = datetime(2020, 1, 1, tzinfo=UTC)
    assert [await store.put(entry(f"b-{user}", user).to_row(began)) for user in users] == [False, True]
    assert [len(await store.list(user)) for user in users] == [0, 2]
    await store.close()


async def test_a_conversation_in_use_is_kept_as_a_whole():
    """The least recently used responses in memory go first."""
    store = MemoryResponses(ResponseStoreSettings(entries=4), Clock())
    await put(store, entry("a"), entry("b", before="a"))
    for name in "wxyz":
        await context(store, "b")
        await put(store, entry(name))
    assert await store.find("a", "me")
    assert await store.find("w", "me") is None
    assert len(store) == 4
