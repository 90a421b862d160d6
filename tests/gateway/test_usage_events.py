"""Every way in which an answer can end leaves one event, with what its client was told that it used."""

import sqlite3
from uuid import UUID

import pytest
from sqlalchemy import select

from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Caller, TokenStream
from llmops.gateway.settings import GatewaySettings, UsageSettings
from llmops.gateway.usage.open_answers import read_slots
from llmops.gateway.usage.sink import NoPrices, UsageSink
from llmops.gateway.usage.usage_check import UsageCheck, create_usage_check
from llmops.store.factory import open_store
from llmops.store.tables import usage_records
from tests.support.gateway_stack import BODIES, CHAT, MESSAGES, RESPONSES, running
from tests.support.scripted_triton import Step
from tests.support.waiting import eventually

ANN = str(UUID(int=7))


class Kept(UsageSink):
    """A ledger in memory."""

    def __init__(self) -> None:
        self.events = {}

    async def write(self, events) -> None:
        for event in events:
            self.events.setdefault(event.id, event)

    async def confirmed(self, ids) -> frozenset[str]:
        return frozenset(ids) & frozenset(self.events)


class Ann(Check):
    async def before(self, scope, context) -> None:
        context.caller = Caller("acme", ANN, "key-a", "acme/key-a", tier="pro")


class Metered:
    def __init__(self, stack, ledger, check) -> None:
        self.stack, self.ledger, self.check, self.post = stack, ledger, check, stack.client.post

    async def one(self):
        """The only event there is, once every request is over."""
        (event,) = await self.events(1)
        return event

    async def events(self, count):
        await self.stack.idle()
        await eventually(lambda: len(self.ledger.events) >= count)
        # what comes twice or too much would come now
        await self.check.settle(10)
        assert len(self.ledger.events) == count
        return sorted(self.ledger.events.values(), key=lambda event: event.seq)


@pytest.fixture
async def metered(card, tokenizer, tmp_path):
    ledger = Kept()
    check = UsageCheck(tmp_path / "usage", UsageSettings(), ledger, NoPrices())
    await check.start()
    async with running({**card, "max_batch_size": 8, "max_seq_len": 8192}, tokenizer, checks=[Ann(), check]) as stack:
        yield Metered(stack, ledger, check)
    await check.close()


def used(body):
    usage = body["usage"]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    return usage["input_tokens"], usage["output_tokens"]


async def test_the_event_is_written_before_the_answer_ends(metered):
    """Whoever has the end of an answer can be sure that it is on the bill, though the gateway is killed then."""
    metered.stack.say("Hello")
    slots = metered.check.worker.lock.folder / "open-answers"
    async with metered.stack.client.stream("POST", CHAT, json={**BODIES[CHAT], "stream": True}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                left = read_slots(slots)
                assert left.unfinished == []
                assert len(left.ended) + metered.check.worker.outbox.last_place == 1
    assert (await metered.one()).finish_reason == "stop"


async def test_what_fails_before_its_first_token_is_nobodys_to_pay(metered):
    metered.stack.steps(Step(error="out of memory"))
    assert (await metered.post(CHAT, json=BODIES[CHAT])).status_code == 500
    assert (await metered.post(CHAT, json={**BODIES[CHAT], "n": 99})).status_code == 400
    metered.stack.say("Hello")
    await metered.post(CHAT, json=BODIES[CHAT])
    assert (await metered.one()).status == 200


async def test_where_it_ended_and_how_often_it_moved(metered, monkeypatch):
    monkeypatch.setattr(TokenStream, "replica", "triton-1:8001")
    monkeypatch.setattr(TokenStream, "splices", {"exact": 1, "approximate": 2})
    metered.stack.say("Hello")
    await metered.post(CHAT, json=BODIES[CHAT])
    event = await metered.one()
    assert (event.replica, event.migrations) == ("triton-1:8001", 3)


async def test_what_the_engine_had_in_its_cache_is_told_and_billed_alike(metered, monkeypatch):
    monkeypatch.setattr(TokenStream, "cached_tokens", 3)
    metered.stack.say("Hello")
    chat = (await metered.post(CHAT, json=BODIES[CHAT])).json()["usage"]
    assert chat["prompt_tokens_details"] == {"cached_tokens": 3, "audio_tokens": 0}
    response = (await metered.post(RESPONSES, json=BODIES[RESPONSES])).json()["usage"]
    assert response["input_tokens_details"]["cached_tokens"] == 3
    # Anthropic's input_tokens are those that were not in a cache
    message = (await metered.post(MESSAGES, json=BODIES[MESSAGES])).json()["usage"]
    assert (message["cache_read_input_tokens"], message["input_tokens"]) == (3, chat["prompt_tokens"] - 3)
    events = await metered.events(3)
    assert {(event.input_tokens, event.cached_tokens) for event in events} == {(chat["prompt_tokens"], 3)}


@pytest.mark.parametrize(("when_full", "status"), [("refuse", 503), ("serve", 200)])
async def test_no_room_for_usage(metered, monkeypatch, when_full, status):
    """Open answers are finished, and their events wait for room.

    Later requests are rejected, or served all the same.
    """

    def full(events):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(metered.check._settings, "when_full", when_full)
    metered.stack.say("Hello")
    with monkeypatch.context() as patch:
        patch.setattr(metered.check.worker.outbox, "add", full)
        assert (await metered.post(CHAT, json=BODIES[CHAT])).status_code == 200
        await eventually(lambda: metered.check.worker.writer.trouble)
        answer = await metered.post(CHAT, json=BODIES[CHAT])
        assert answer.status_code == status
        if status == 503:
            assert answer.json()["error"]["code"] == "usage_unavailable"
            # what needs no bill goes on
            assert (await metered.stack.client.get("/v1/models")).status_code == 200
    # there is room again
    assert (await metered.post(CHAT, json=BODIES[CHAT])).status_code == 200
    events = await metered.events(2 if status == 503 else 3)
    assert {event.finish_reason for event in events} == {"stop"}


async def test_rows_of_a_store_anonymous_and_priced_by_the_ledger(card, tokenizer, tmp_path):
    """A gateway with a store removes its folder when the ledger has all events."""
    url = f"sqlite:///{tmp_path}/store.db"
    async with running(card, tokenizer, store=url, open=True, usage={"outbox": tmp_path / "usage"}) as stack:
        stack.say("Hello world!")
        answer = (await stack.chat()).json()
        async with await open_store(url) as store:

            async def rows():
                async with store.read() as connection:
                    return (await connection.execute(select(usage_records))).mappings().all()

            await eventually(rows)
            (row,) = await rows()
    assert row["user_id"] == str(UUID(int=0))
    assert (row["input_tokens"], row["output_tokens"]) == used(answer)
    assert (row["key_id"], row["price_id"], row["cost_micros"]) == (None, None, 0)
    assert list((tmp_path / "usage").iterdir()) == []


def test_without_a_store_there_is_no_usage_room():
    assert create_usage_check(GatewaySettings()) is None
