"""Two gateways with one store: a response is the same one whichever gateway a request reaches."""

import asyncio
import json
import sqlite3

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from llmops.gateway.conversations.event_replay import RESPONSE_GONE
from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import Stack, running, serving
from tests.support.scripted_triton import Step
from tests.support.waiting import GENEROUS, eventually

PATH = "/v1/responses"


class Pair:
    """Two gateways in front of one Triton."""

    def __init__(self, stack: Stack, *others: httpx.AsyncClient) -> None:
        self.clients, self.say, self.idle = [stack.client, *others], stack.say, stack.idle
        self.triton, self.tokenizer = stack.triton, stack.tokenizer

    async def ask(self, index: int, method: str, tail: str = "", **body) -> httpx.Response:
        return await self.clients[index].request(method, PATH + tail, json=body or None, timeout=GENEROUS)

    async def create(self, index: int, **fields) -> dict:
        return (await self.ask(index, "POST", model="tiny", input="hi", **fields)).json()


def events_of(lines) -> list[dict]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.fixture
async def pair(card, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.SAVE_INTERVAL", 0.05)
    # a machine that stands still is no store that is away
    monkeypatch.setattr("llmops.gateway.conversations.database.STORE_TIMEOUT", GENEROUS)
    own = {"store": f"sqlite:///{tmp_path}/store.db", "open": True}
    async with (
        running(card, tokenizer, **own) as stack,
        serving(GatewaySettings(triton=stack.triton.address, **own)) as (other, _),
    ):
        yield Pair(stack, other)


async def test_a_finished_response_is_everywhere(pair):
    pair.say("Paris.")
    first = await pair.create(0)
    assert (await pair.ask(1, "GET", f"/{first['id']}")).json() == first
    assert (await pair.ask(1, "GET", f"/{first['id']}/input_items")).json()["data"][0]["role"] == "user"
    events = (await pair.ask(1, "GET", f"/{first['id']}?stream=true&starting_after=2")).text
    assert events.count("event: ") == events.count("data: ") > 3
    assert (await pair.create(1, previous_response_id=first["id"]))["status"] == "completed"
    assert "<assistant>Paris." in pair.tokenizer.decode(pair.triton.requests[-1]["input_ids"])
    assert (await pair.ask(1, "DELETE", f"/{first['id']}")).json()["deleted"]
    assert (await pair.ask(0, "GET", f"/{first['id']}")).status_code == 404


async def test_cancel_reaches_the_gateway_that_generates(pair):
    pair.say("Hello world! How are you? ", Step(hang=True))
    running = await pair.create(0, background=True)
    await eventually(lambda: pair.triton.active == 1)
    stopped = await pair.ask(1, "POST", f"/{running['id']}/cancel")
    assert (stopped.status_code, stopped.json()["status"]) == (200, "cancelled")
    await pair.idle()
    for index in (0, 1):
        assert (await pair.ask(index, "GET", f"/{running['id']}")).json() == stopped.json()


async def test_cancellations_that_wait_count_against_the_held_bytes(card, tokenizer, tmp_path):
    """Before the fix, each had the whole response in memory, uncounted, while it waited for the other gateway."""
    own = {"store": f"sqlite:///{tmp_path}/store.db", "open": True}
    bounded = {**own, "limits": {"held_bytes": 20_000}}
    async with (
        running(card, tokenizer, **own) as stack,
        serving(GatewaySettings(triton=stack.triton.address, **bounded)) as (other, _),
    ):
        pair = Pair(stack, other)
        pair.say("Hello world! How are you? ", Step(hang=True))
        running_one = await pair.create(0, background=True, metadata={f"{at}": "x" * 500 for at in range(10)})
        cancels = [pair.ask(1, "POST", f"/{running_one['id']}/cancel") for _ in range(5)]
        statuses = {answer.status_code for answer in await asyncio.gather(*cancels)}
        assert statuses == {200, 503}
        await pair.idle()


async def test_a_response_that_another_gateway_deletes_ends_and_stays_deleted(pair, caplog):
    caplog.set_level("INFO")
    pair.say("Hello world! How are you? ", Step(hang=True))
    running = await pair.create(0, background=True)
    await eventually(lambda: pair.triton.active == 1)
    async with pair.clients[0].stream("GET", f"{PATH}/{running['id']}?stream=true", timeout=GENEROUS) as reply:
        lines = reply.aiter_lines()
        await anext(lines)
        assert (await pair.ask(1, "DELETE", f"/{running['id']}")).status_code == 200
        await pair.idle()
        assert events_of([line async for line in lines])[-1]["response"]["error"]["message"] == RESPONSE_GONE
    for index in (0, 1):
        assert (await pair.ask(index, "GET", f"/{running['id']}")).status_code == 404
    assert f"The response {running['id']} ends: a client deleted it, or its row" in caplog.text


async def test_a_response_that_streams_while_all_is_deleted_is_not_stored(pair):
    """Before, it was stored when it ended, whatever its owner had deleted at another gateway."""
    pair.say("Hello world! How are you?", wait=0.1)
    asked = asyncio.create_task(pair.ask(0, "POST", model="tiny", input="hi", stream=True))
    await eventually(lambda: pair.triton.active == 1)
    assert (await pair.clients[1].delete("/api/conversations")).status_code == 200
    last = events_of((await asked).text.splitlines())[-1]["response"]
    assert (last["status"], last["store"]) == ("completed", False)
    assert (await pair.ask(1, "GET", f"/{last['id']}")).status_code == 404
    pair.say("Paris.")
    assert (await pair.create(0))["store"] is True


async def test_a_stream_can_be_read_in_parts_from_the_other_gateway(pair):
    pair.say("Hello world! How are you? Hello world!", wait=0.1)
    running = await pair.create(0, background=True)
    followed = ""
    while "response.completed" not in followed:
        after = f"&starting_after={followed.count('data: ') - 1}" if followed else ""
        followed += (await pair.ask(1, "GET", f"/{running['id']}?stream=true{after}")).text
        await asyncio.sleep(0.02)
    assert followed == (await pair.ask(0, "GET", f"/{running['id']}?stream=true")).text
    numbers = [event["sequence_number"] for event in events_of(followed.splitlines())]
    assert numbers == list(range(len(numbers)))


async def test_a_response_whose_gateway_is_gone_has_failed(pair, monkeypatch):
    pair.say("Hello world! ", Step(hang=True))
    # it reports nothing any more
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.SAVE_INTERVAL", 3600.0)
    running = await pair.create(0, background=True)
    assert (await pair.ask(1, "GET", f"/{running['id']}")).json()["status"] == "in_progress"
    monkeypatch.setattr("llmops.gateway.api.responses.LOST_RUN_TIMEOUT", 0.0)
    lost = (await pair.ask(1, "GET", f"/{running['id']}")).json()
    assert lost["status"] == "failed"
    assert "was lost; create the response again" in lost["error"]["message"]
    assert (await pair.ask(1, "GET", f"/{running['id']}")).json() == lost


@pytest.mark.parametrize("shared", [True, False])
async def test_a_response_that_outgrows_the_store_says_so(card, tokenizer, tmp_path, monkeypatch, shared):
    """Before, it failed as if its gateway had been lost; creating it again costs as much and fails again."""
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.SAVE_INTERVAL", 0.05)
    monkeypatch.setattr("llmops.gateway.api.responses.LOST_RUN_TIMEOUT", 0.0)
    where = {"store": f"sqlite:///{tmp_path}/store.db"} if shared else {}
    async with running(card, tokenizer, **where, open=True, responses={"item_bytes": 2000}) as stack:
        pair = Pair(stack)
        pair.say("Hello world! " * 50, wait=0.005)
        large = await pair.create(0, background=True)
        followed = (await pair.ask(0, "GET", f"/{large['id']}?stream=true")).text
        stored = (await pair.ask(0, "GET", f"/{large['id']}")).json()
        again = (await pair.ask(0, "GET", f"/{large['id']}?stream=true")).text
    last = events_of(followed.splitlines())[-1]["response"]
    assert (last["status"], last["store"]) == ("completed", False)
    assert (stored["status"], stored["error"]["code"], stored["usage"]) == ("failed", "server_error", last["usage"])
    assert "the setting responses.item_bytes allows 2,000" in stored["error"]["message"]
    # the store in memory is written at the end alone
    assert [item["status"] for item in stored["output"]] == (["incomplete"] if shared else [])
    assert "response.failed" in again


async def test_what_cannot_be_stored_says_so(card, tokenizer, tmp_path, monkeypatch):
    """A store that fails costs no answer, and no answer says that it was stored."""

    async def full(*_, **__):
        raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        pair = Pair(stack)
        pair.say("Paris.")
        assert (await pair.create(0))["store"] is True
        monkeypatch.setattr("llmops.store.responses.put_response", full)
        lost = await pair.create(0)
        assert (lost["status"], lost["store"]) == ("completed", False)
        assert (await pair.ask(0, "GET", f"/{lost['id']}")).status_code == 404
        streamed = await pair.ask(0, "POST", model="tiny", input="hi", stream=True)
        last = events_of(streamed.text.splitlines())[-1]
        assert (last["type"], last["response"]["store"]) == ("response.completed", False)
        refused = await pair.ask(0, "POST", model="tiny", input="hi", background=True)
        assert (refused.status_code, "store: false" in refused.json()["error"]["message"]) == (503, True)
