"""Streams that are read, stopped and continued at another gateway, through a real Valkey."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis import Redis

from llmops.gateway.conversations.answer_run import AnswerLog
from llmops.gateway.errors import ModelNotFoundError
from llmops.gateway.generation.parsers.output_processor import ContentDelta, ToolCallDelta
from llmops.gateway.settings import GatewaySettings, ResumeSettings
from llmops.store.factory import open_store
from tests.support.gateway_stack import serving
from tests.support.resuming_reader import CHAT, OPENAI, RESPONSES, BackgroundReader, ResumingReader
from tests.support.servers import Valkey
from tests.support.told_answers import ToldAnswers
from tests.support.usage_rows import billed_rows
from tests.support.waiting import GENEROUS, eventually

CHATS = "/api/conversations"


@pytest.fixture(scope="module")
def valkey():
    with Valkey() as one:
        yield one


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch, valkey: Valkey) -> None:
    """A machine that stands still is no store or Valkey that is away, and no gateway that is gone."""
    # what an earlier test left running would be taken over
    with Redis.from_url(valkey.url) as client:
        client.flushall()
    monkeypatch.setattr("llmops.gateway.conversations.database.STORE_TIMEOUT", GENEROUS)
    monkeypatch.setattr("llmops.gateway.conversations.checkpoints.TIMEOUT", GENEROUS)


@pytest.fixture
async def told(card, tokenizer):
    answers = ToldAnswers(card, tokenizer)
    async with answers.triton:
        yield answers


def shared(told: ToldAnswers, valkey: Valkey, folder: Path, lease: str) -> GatewaySettings:
    own = {"store": f"sqlite:///{folder}/store.db", "usage": {"outbox": folder / "usage"}}
    return GatewaySettings(triton=told.triton.address, open=True, redis=valkey.url, resume={"lease": lease}, **own)


@pytest.fixture
async def gateways(told, valkey, tmp_path):
    """Two gateways with one store and one Valkey."""
    settings = shared(told, valkey, tmp_path, "6s")
    # A machine that stands still is no gateway that is lost.
    settings = settings.model_copy(update={"resume": ResumeSettings.model_construct(lease=60.0)})
    async with AsyncExitStack() as stack:
        yield [(await stack.enter_async_context(serving(settings)))[0] for _ in range(2)]


def reader_of(path: str, question: str) -> ResumingReader:
    return BackgroundReader(question) if path == RESPONSES else ResumingReader(question, path)


@pytest.mark.parametrize("path", [CHAT, OPENAI, RESPONSES])
async def test_a_stream_goes_on_at_another_gateway(gateways, told, path):
    one, other = gateways
    reader, again, whole = (reader_of(path, "Where is it?") for _ in range(3))
    await reader.read(one, 4)
    again.run = whole.run = reader.run
    await asyncio.gather(reader.whole(other), again.whole(other))
    await whole.whole(one)
    assert reader.text == again.text == told.text("Where is it?")
    # the events are the same bytes, wherever they are made
    assert reader.raw == again.raw == whole.raw


async def test_only_its_owner_reads_or_stops_a_stream_and_a_wrong_event_id_is_refused(gateways):
    one, other = gateways
    reader = ResumingReader("Where?")
    await reader.read(one, 3)
    url, theirs = f"{CHAT}/{reader.run}", {"authorization": "Bearer somebody-else"}
    for method in ("GET", "DELETE"):
        assert (await other.request(method, url, headers=theirs)).status_code == 410
    assert (await other.get(f"{CHAT}/chatcmpl-{'0' * 24}")).json()["error"]["code"] == "stream_gone"
    for event in ("x", "000000-1", f"{reader.run[-6:]}-99"):
        refused = await other.get(url, headers={"last-event-id": event})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_event_id")
        assert f"'{event}' is not the id of an event" in refused.json()["error"]["message"]


async def test_a_gateway_that_does_not_know_the_model_yet_says_to_come_again(gateways, told, monkeypatch):
    """Before the fix, it said 404, after which no reader comes again."""
    one, other = gateways
    reader = ResumingReader("Where is it?", OPENAI)
    await reader.read(one, 4)

    def unknown(self, name):
        raise ModelNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr("llmops.gateway.routing.model_registry.ModelLookup.find", unknown)
        refused = await other.get(f"{OPENAI}/{reader.run}")
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert await reader.whole(other) == told.text("Where is it?")


async def test_a_stream_is_stopped_at_another_gateway_and_stored(gateways, told):
    one, other = gateways
    told.wait = 0.05
    talk = (await one.post(CHATS, json={})).json()["id"]
    reader = ResumingReader("Where?", conversation_id=talk)
    await reader.read(one, 3)
    # within a second the lease is far from over: the next tokens carry the wish
    stopped = (await other.delete(f"{CHAT}/{reader.run}", timeout=GENEROUS)).json()
    assert (stopped["status"], stopped["saved"]) == ("incomplete", True)
    message = (await other.get(f"{CHATS}/{talk}")).json()["messages"][-1]
    assert (message["status"], message["finish_reason"]) == ("incomplete", "cancelled")
    assert told.text("Where?").startswith(message["content"])


def test_what_a_running_answer_keeps_for_its_readers_is_small():
    """English has about four characters in a token, and each delta costs two bytes."""
    log, text = AnswerLog(), "The quick brown fox jumps over the lazy dog near the river bank. "
    for at in range(0, 4000, 4):
        log.append(ContentDelta((text * 99)[at : at + 4]))
    assert log.nbytes <= 8 * len(log)
    assert log.pieces() == [ContentDelta((text * 99)[:4000])]


def test_the_calls_of_an_answer_are_found_in_one_pass(monkeypatch):
    """Before the fix, 10,000 calls held the gateway for a second each time that the answer was stored."""
    log, passed, offset = AnswerLog(), [], AnswerLog.offset
    monkeypatch.setattr(AnswerLog, "offset", lambda self, delta: passed.append(delta) or offset(self, delta))
    for at in range(1000):
        log.append(ToolCallDelta(at, f"call_{at}", "é"))
        log.append(ToolCallDelta(at, arguments="{"))
        log.append(ToolCallDelta(at, arguments="é}"))
    assert log.pieces() == [ToolCallDelta(at, f"call_{at}", "é", "{é}") for at in range(1000)]
    assert sum(passed) <= len(log)


async def test_a_response_in_the_background_is_cancelled_or_deleted_at_another_gateway(gateways, told):
    one, other = gateways
    told.wait = 0.05
    for method, tail in (("POST", "/cancel"), ("DELETE", "")):
        reader = BackgroundReader(f"{method}?")
        await reader.read(one, 5)
        url, theirs = f"{RESPONSES}/{reader.run}", {"authorization": "Bearer somebody-else"}
        assert (await other.get(f"{url}?stream=true", headers=theirs)).status_code == 404
        assert (await other.request(method, url + tail, timeout=GENEROUS)).status_code == 200
        await eventually(lambda: told.triton.active == 0)
        found = [(await client.get(url)).json() for client in gateways]
        assert (found[0], found[0].get("status")) == (found[1], "cancelled" if tail else None)


async def test_a_reader_at_another_gateway_keeps_an_answer_alive_and_none_ends_it(gateways, told, monkeypatch):
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.UNREAD_TIMEOUT", 0.5)
    monkeypatch.setattr("llmops.gateway.conversations.checkpoints.READING_SECONDS", 0.5)
    one, other = gateways
    told.wait = 0.1
    reader = ResumingReader("Where is it?")
    await reader.read(one, 2)
    await reader.whole(other)
    assert reader.text == told.text("Where is it?")
    alone = ResumingReader("And now?")
    await alone.read(one, 2)
    await eventually(lambda: told.triton.active == 0)
    await alone.read(one)
    assert alone.ended is None
    assert told.text("And now?").startswith(alone.text)


async def test_a_valkey_that_goes_away_in_the_middle_ends_nothing(told, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("llmops.gateway.conversations.checkpoints.TIMEOUT", 0.5)
    told.wait = 0.05
    with Valkey() as own:
        settings = GatewaySettings(triton=told.triton.address, redis=own.url)
        async with serving(settings) as (one, _), serving(settings) as (other, _):
            reader = ResumingReader("Where is it?")
            await reader.read(one, 3)
            own.kill()
            assert await reader.whole(one) == told.text("Where is it?")
            away = await other.get(f"{CHAT}/{reader.run}", timeout=GENEROUS)
            assert (away.status_code, away.json()["error"]["code"]) == (503, "streams_unavailable")
            own.start()
            await eventually(lambda: caplog.text.count("running answers survive") == 2)
            after = ResumingReader("And after?")
            await after.read(one, 3)
            assert await after.whole(other) == told.text("And after?")


async def test_an_answer_of_a_gateway_that_ends_goes_on_at_another(told, valkey, tmp_path):
    told.wait = 0.03
    settings = shared(told, valkey, tmp_path, "0.5s")
    async with serving(settings) as (other, _):
        async with serving(settings) as (one, _):
            talk = (await one.post(CHATS, json={})).json()["id"]
            other_talk = (await one.post("/v1/conversations", json={})).json()["id"]
            readers = {"Where is it?": ResumingReader("Where is it?", conversation_id=talk)}
            readers["Who?"] = ResumingReader("Who?", OPENAI)
            readers["When?"] = BackgroundReader("When?", conversation=other_talk)
            for reader in readers.values():
                await reader.read(one, 5)
        for question, reader in readers.items():
            assert await reader.whole(other) == told.text(question)
        stored = (await other.get(f"{RESPONSES}/{readers['When?'].run}")).json()
        assert (stored["status"], stored["output"][0]["content"][0]["text"]) == ("completed", told.text("When?"))
        items = (await other.get(f"/v1/conversations/{other_talk}/items")).json()["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]
        message = (await other.get(f"{CHATS}/{talk}")).json()["messages"][-1]
        assert (message["content"], message["status"]) == (told.text("Where is it?"), "completed")
    async with await open_store(settings.store) as store:
        rows = await billed_rows(store)
    billed = sorted((row["request_id"], row["output_tokens"], row["finish_reason"]) for row in rows)
    assert billed == sorted((reader.run, 40, "stop") for reader in readers.values())


async def test_random_cuts_on_two_gateways(gateways, told):
    """Each of these streams is cut a few times, at any place."""
    chance = random.Random(27)

    async def cut(at: int) -> None:
        question = f"Number {at}?"
        reader = reader_of(chance.choice((CHAT, OPENAI, RESPONSES)), question)
        while reader.ended is None:
            await reader.read(chance.choice(gateways), len(reader.raw) + chance.randint(1, 30))
        assert reader.text == told.text(question)

    await asyncio.gather(*map(cut, range(40)))
