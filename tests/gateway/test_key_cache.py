"""Tests of the key cache: its contents, their lifetime, and an unavailable store."""

import asyncio
from types import SimpleNamespace

import pytest

from llmops.gateway.auth.credential_cache import CachedDirectory
from llmops.gateway.auth.directory import Directory
from llmops.gateway.errors import InvalidKeyError, UnavailableError
from llmops.gateway.interfaces import Caller
from tests.fleet.views import settled
from tests.support.waiting import Clock

ANN = Caller("acme", "ann", "key-1")


class Book(Directory):
    """Callers by key; `away` as a store can be, `over` what is said of a key that is over."""

    def __init__(self) -> None:
        self.callers = {"ann": ANN}
        self.over: dict[str, str] = {}
        self.away = False
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def takes(self, credential):
        return True

    async def find(self, credential):
        self.asked.append(credential)
        await self.gate.wait()
        if self.away:
            raise UnavailableError("away", detail="gone")
        if credential in self.over:
            raise InvalidKeyError(self.over[credential])
        return self.callers.get(credential)

    async def has_credentials(self):
        self.asked.append("any")
        if self.away:
            raise UnavailableError("away")
        return bool(self.callers)


@pytest.fixture
def book():
    return Book()


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
async def cached(book, clock):
    made = CachedDirectory(book, fresh=30, stale=3600, clock=clock)
    yield made
    await made.close()


async def test_one_look_up_for_all_who_ask_at_once_and_for_as_long_as_it_is_fresh(cached, book, clock):
    book.gate.clear()
    asking = [asyncio.create_task(cached.find("ann")) for _ in range(50)]
    await settled()
    # one who leaves takes the look-up from no other client
    asking[0].cancel()
    book.gate.set()
    assert await asyncio.gather(*asking[1:]) == [ANN] * 49
    clock.now += 14.9
    assert await cached.find("ann") is ANN
    assert book.asked == ["ann"]


async def test_a_key_in_use_is_looked_up_beside_its_requests(cached, book, clock):
    await cached.find("ann")
    clock.now += 16
    book.gate.clear()
    assert await cached.find("ann") is ANN
    assert await cached.find("ann") is ANN
    await settled()
    assert book.asked == ["ann", "ann"]
    book.over["ann"] = "revoked"
    book.gate.set()
    await settled()
    with pytest.raises(InvalidKeyError, match="revoked"):
        await cached.find("ann")
    assert book.asked == ["ann", "ann"]


async def test_what_nobody_has_is_remembered_and_never_more_of_it_than_the_bound(cached, book, clock, monkeypatch):
    monkeypatch.setattr("llmops.gateway.auth.credential_cache.MAX_REJECTED_CREDENTIALS", 100)
    await cached.find("ann")
    for _ in range(3):
        assert await cached.find("bob") is None
    assert book.asked == ["ann", "bob"]
    for at in range(1000):
        assert await cached.find(f"random-{at}") is None
    assert len(cached._refused) == 100
    # they push out none of the callers
    assert await cached.find("ann") is ANN
    assert book.asked.count("ann") == 1
    clock.now += 30
    book.callers["bob"] = ANN
    assert await cached.find("bob") is ANN


async def test_while_the_store_is_away_callers_stay_for_an_hour_and_others_are_told_to_come_back(
    cached, book, clock, caplog
):
    await cached.find("ann")
    book.away = True
    clock.now += 31
    assert await cached.find("ann") is ANN
    for _ in range(20):
        assert await cached.find("ann") is ANN
        with pytest.raises(UnavailableError) as refused:
            await cached.find("bob")
    assert (refused.value.code, refused.value.detail) == ("keys_unavailable", None)
    # tried once, and again after a second
    assert book.asked == ["ann", "ann"]
    clock.now += 1
    # Before the fix, this request waited for a store that hangs, and its connection was closed to make room.
    book.gate.clear()
    assert await asyncio.wait_for(cached.find("ann"), 1.0) is ANN
    book.gate.set()
    await settled()
    assert book.asked == ["ann"] * 3
    clock.now = 1000 + 3599
    assert await cached.find("ann") is ANN
    clock.now = 1000 + 3600
    with pytest.raises(UnavailableError):
        await cached.find("ann")
    book.away = False
    clock.now += 1
    assert await cached.find("ann") is ANN
    assert [record.getMessage() for record in caplog.records] == [
        "Keys cannot be looked up; keys in use stay valid for 3600 s. away (gone)",
        "Keys can be looked up again after 3570 s.",
    ]


async def test_a_key_ends_by_the_clock_whatever_is_remembered_and_whether_its_store_is_there(
    cached, book, clock, monkeypatch
):
    book.callers["brief"] = Caller("acme", "ann", "key-2", until=2_000_000_000)
    monkeypatch.setattr("llmops.gateway.auth.credential_cache.time", SimpleNamespace(time=lambda: 1_999_999_999.9))
    assert (await cached.find("brief")).key_id == "key-2"
    book.away = True
    monkeypatch.setattr("llmops.gateway.auth.credential_cache.time", SimpleNamespace(time=lambda: 2_000_000_000.0))
    for later in (0, 31):
        clock.now += later
        with pytest.raises(InvalidKeyError, match="This API key has expired"):
            await cached.find("brief")


async def test_once_there_was_a_key_there_is(cached, book, clock):
    book.callers.clear()
    book.away = True
    with pytest.raises(UnavailableError):
        await cached.has_credentials()
    book.away = False
    assert not await cached.has_credentials()
    asked = len(book.asked)
    book.callers["ann"] = ANN
    assert not await cached.has_credentials()
    assert len(book.asked) == asked
    clock.now += 1
    book.away = True
    # the store cannot say, so the key is as it was
    assert not await cached.has_credentials()
    book.away = False
    clock.now += 1
    assert await cached.has_credentials()
    book.callers.clear()
    clock.now += 100
    assert await cached.has_credentials()


async def test_a_token_refused_for_its_form_does_not_say_whether_the_store_is_there(
    cached, book, clock, monkeypatch, caplog
):
    """Before the fix, such tokens of strangers had callers in use wait for a store that hangs, one after the other."""
    find = book.find

    async def find_formed(credential):
        if credential.startswith("made-up"):
            raise InvalidKeyError("This is no token.")
        return await find(credential)

    monkeypatch.setattr(book, "find", find_formed)
    assert await cached.find("ann") == ANN
    book.away, clock.now = True, clock.now + 40
    assert await cached.find("ann") == ANN
    clock.now += 2
    asked = len(book.asked)
    with pytest.raises(InvalidKeyError):
        await cached.find("made-up-1")
    for _ in range(3):
        assert await cached.find("ann") == ANN
        await settled()
    assert len(book.asked) == asked + 1
    assert "again" not in caplog.text
