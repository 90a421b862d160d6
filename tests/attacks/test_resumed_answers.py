"""Attack: an answer with another owner's id, in the Redis where gateways share running answers."""

import asyncio
import json
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest
from redis import Redis
from sqlalchemy import select

from llmops.gateway.conversations.answer_run import REPLAY_TURN, AnswerLog, AnswerReader, AnswerRun, replay_batches
from llmops.gateway.conversations.checkpoints import MAX_BATCH, PREFIX, CheckpointStore, FollowedTokens
from llmops.gateway.conversations.conversation_turn import StoredAnswer
from llmops.gateway.conversations.sql_responses import SqlResponses
from llmops.gateway.errors import UnavailableError
from llmops.gateway.generation.chat_generation import ChatGeneration
from llmops.gateway.generation.parsers.output_processor import ContentDelta
from llmops.gateway.interfaces import Usage, UsageOwner
from llmops.gateway.settings import GatewaySettings
from llmops.store.factory import open_store
from llmops.store.tables import usage_records
from tests.attacks.harness import MIB, record
from tests.attacks.test_stored_responses import TenantsInHeaders
from tests.gateway.test_resumed_streams import gateways, patient, shared, told, valkey
from tests.support.gateway_stack import serving
from tests.support.resuming_reader import OPENAI, BackgroundReader, ResumingReader
from tests.support.servers import Valkey
from tests.support.usage_rows import billed_rows
from tests.support.waiting import GENEROUS, eventually

__all__ = ["gateways", "patient", "told", "valkey"]


async def test_answers_of_two_owners_with_one_id(gateways, told):
    """The id of a continued answer is that of its message, which a client may choose."""
    one, other = gateways
    told.wait = 0.03
    victim = ResumingReader("Where is it?")
    await victim.read(one, 2)
    theirs = {"authorization": "Bearer attacker"}
    same = {"id": f"msg_{victim.run.removeprefix('chatcmpl-')}"}
    turns = {"user": {"content": "Mine"}, "assistant": {"content": "A", **same}}
    items = [{"type": "message", "role": role, **fields} for role, fields in turns.items()]
    conversation = (await one.post("/v1/conversations", json={"items": items}, headers=theirs)).json()["id"]
    body = {"model": "tiny", "messages": [], "continue_final_message": True, "conversation_id": conversation}
    taken = asyncio.create_task(one.post("/api/chat/completions", json={**body, "stream": False}, headers=theirs))
    await asyncio.sleep(0.3)
    stopped = await other.delete(f"/api/chat/completions/{victim.run}", headers=theirs)
    assert (await taken).json()["id"] == victim.run
    again = ResumingReader("Where is it?")
    again.run = victim.run
    await asyncio.gather(victim.whole(one), again.whole(other))
    record(f"the attacker stopped {stopped.json().get('id')}, the victim read {len(again.text)} characters elsewhere")
    assert victim.text == again.text == told.text("Where is it?")


async def test_answers_of_one_owner_do_not_push_out_anothers(told, tmp_path, monkeypatch):
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.MAX_RETAINED_RUNS", 10)
    told.wait = 0.0
    settings = GatewaySettings(triton=told.triton.address, store=f"sqlite:///{tmp_path}/store.db", open=True)
    async with serving(settings) as (client, _):
        victim = ResumingReader("Where is it?", OPENAI)
        await victim.whole(client)
        for number in range(15):
            assert (await ask(client, f"attacker-{number % 2}")).status_code == 200
        kept = await client.get(f"{OPENAI}/{victim.run}")
    record(f"{kept.status_code} for the rest of an answer of another owner")
    assert kept.status_code == 200


async def test_answers_of_many_users_of_a_tenant_do_not_push_out_anothers(told, monkeypatch):
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.MAX_RETAINED_RUNS", 10)
    told.wait = 0.0
    async with serving(GatewaySettings(triton=f"127.0.0.1:{told.triton.port}"), [TenantsInHeaders()]) as (client, _):
        users = ("acme/a", "acme/a", *(f"evil/{at}" for at in range(15)))
        asked = [await ask(client, "key", user=user) for user in users]
        assert {one.status_code for one in asked} == {200}
        headers = {"x-user": "acme/a"}
        kept = [await client.get(f"{OPENAI}/{run_of(one)}", headers=headers) for one in asked[:2]]
    record(f"{[one.status_code for one in kept]} for the rest of another tenant's answers")
    assert [one.status_code for one in kept] == [200, 200]


async def ask(client, key: str, user: str = "", **fields) -> httpx.Response:
    """Send a request whose answer can be resumed, and read all of it."""
    headers = {"authorization": f"Bearer {key}", "x-llmops-resume": "true", "x-user": user}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Mine"}], "max_tokens": 1, "stream": True}
    return await client.post(OPENAI, json={**body, **fields}, headers=headers)


@pytest.fixture
def small_redis(monkeypatch):
    """A gateway may keep 4 MB of requests in Redis."""
    monkeypatch.setattr("llmops.gateway.conversations.checkpoints.MAX_RECORDS_BYTES", 4_000_000)


async def test_large_requests_do_not_fill_redis(small_redis, gateways, valkey):
    """Redis keeps the request of an answer until a minute after its end."""
    one, other = gateways
    redis = Redis.from_url(valkey.url)
    before = redis.info("memory")["used_memory"]
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 900_000}}
    for number in range(12):
        assert run_of(await ask(one, f"attacker-{number % 2}", tools=[tool], tool_choice="none"))
    grown = redis.info("memory")["used_memory"] - before
    record(f"{grown / MIB:.1f} MiB more in Redis")
    assert grown < 8 * MIB
    # a small request of another owner is still shared
    victim = ResumingReader("Where is it?", OPENAI)
    await victim.whole(one)
    assert (await other.get(f"{OPENAI}/{victim.run}")).status_code == 200


async def test_a_message_that_is_continued_at_two_gateways_is_billed_by_both(gateways, tmp_path):
    """Redis keeps an answer for a minute after its end; the next one to its message has the same id."""
    items = [{"type": "message", "role": role, "content": "Where?"} for role in ("user", "assistant")]
    items[1]["id"] = f"msg_{'a' * 24}"
    for number in range(4):
        conversation = (await gateways[0].post("/v1/conversations", json={"items": items})).json()["id"]
        body = {"model": "tiny", "messages": [], "continue_final_message": True, "conversation_id": conversation}
        body |= {"max_tokens": 3, "stream": True}
        answer = await gateways[number > 0].post("/api/chat/completions", json=body)
        assert '"finish_reason":"length"' in answer.text

    async def are_billed() -> bool:
        async with await open_store(f"sqlite:///{tmp_path}/store.db") as store, store.read() as connection:
            return (await connection.execute(select(usage_records.c.output_tokens))).scalars().all() == [3] * 4

    await eventually(are_billed)


async def test_readers_who_prepare_long_requests_hold_up_no_other_owner(gateways, monkeypatch):
    one, other = gateways
    attacker = run_of(await ask(one, "attacker"))
    reader, victim = ResumingReader("Where is it?", OPENAI), ""
    await reader.whole(one)
    prepared, prepare = asyncio.Event(), ChatGeneration.replayed_choice

    async def slow(self, max_tokens):
        if self.context.caller.owner != victim:
            await prepared.wait()
        return await prepare(self, max_tokens)

    monkeypatch.setattr(ChatGeneration, "replayed_choice", slow)
    waiting = asyncio.create_task(other.get(f"{OPENAI}/{attacker}", headers={"authorization": "Bearer attacker"}))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(GENEROUS):
        assert (await other.get(f"{OPENAI}/{reader.run}")).status_code == 200
    assert not waiting.done()
    prepared.set()
    assert (await waiting).status_code == 200


async def test_a_request_that_is_nested_as_deeply_as_its_parser_allows_is_read_elsewhere(gateways):
    one, other = gateways
    depth = 200
    run = run_of(await ask(one, "deep", nested=json.loads("[" * depth + "]" * depth)))
    assert (await other.get(f"{OPENAI}/{run}", headers={"authorization": "Bearer deep"})).status_code == 200


def run_of(answer: httpx.Response) -> str:
    """Return the id of a streamed answer."""
    return json.loads(answer.text.partition("data: ")[2].partition("\n")[0])["id"]


async def billed(settings: GatewaySettings) -> dict[str, int]:
    """Return the billed tokens of each answer."""
    async with await open_store(settings.store) as store:
        rows = await billed_rows(store)
    return {row["request_id"]: row["output_tokens"] for row in rows}


async def all_are_billed(settings: GatewaySettings, readers: list[ResumingReader]) -> None:
    """Wait until the bills are those of the answers that `readers` read."""

    async def are_billed() -> bool:
        return (await billed(settings)).keys() == {reader.run for reader in readers}

    await eventually(are_billed)


async def test_a_valkey_that_is_flushed_after_a_takeover_gives_no_tokens_away(told, valkey, tmp_path, monkeypatch):
    """Before the fix, the lost gateway's 3 tokens were on the bill, and not the 40 of the whole answer."""
    monkeypatch.setattr("llmops.gateway.usage.usage_check.ADOPT_INTERVAL", 0.1)
    told.wait = 0.05
    settings = shared(told, valkey, tmp_path, "1s")
    reader = ResumingReader("Where is it?", OPENAI)
    async with serving(settings) as (other, _):
        async with serving(settings) as (one, _):
            await reader.read(one, 4)
        await reader.read(other, 12)
        with Redis.from_url(valkey.url) as client:
            client.flushall()
        await asyncio.sleep(0.5)
        assert await reader.whole(other) == told.text("Where is it?")

        await eventually(lambda: billed(settings))
    assert await billed(settings) == {reader.run: 40}


async def test_an_answer_that_its_owner_continued_after_its_gateway_was_lost_is_not_taken_over(valkey):
    """Before the fix, the lost answer went on beside its continuation, wrote over its text and cost once more."""
    lost, taker = CheckpointStore(valkey.url, 0.5), CheckpointStore(valkey.url, 0.5)
    claimed = []
    await lost.start(lambda _: None)
    await taker.start(lambda _: None)
    answer, same = lost.checkpoint("of:answer"), taker.checkpoint("of:answer")
    answer.register(b"record")
    assert await answer.is_owned()
    same.register(b"its continuation")
    assert await same.is_owned()
    assert not same.holds
    await lost.close()
    same = taker.checkpoint("of:answer")
    same.register(b"its continuation")
    assert await same.is_owned()
    assert same.holds
    # The lost gateway comes back, and asks for the answers of a claim whose reply it did not get.
    back = CheckpointStore(valkey.url, 0.5)
    back._gateway, back._is_claim_heard = lost._gateway, False
    await back.start(claimed.append)
    await eventually(lambda: back._is_claim_heard)
    await back.close()
    assert await same.is_owned()
    await taker._claim(claimed.append)
    assert (claimed, await taker.record("of:answer")) == ([], b"its continuation")
    await taker.close()


async def test_large_requests_of_others_time_out_no_call_and_a_lost_reply_loses_no_answer(valkey, monkeypatch):
    """Before the fix, one call took 24 MB, and answers whose claim had no reply were not continued by any gateway."""
    lost, taker = CheckpointStore(valkey.url, 0.5), CheckpointStore(valkey.url, 0.5)
    sizes: list[int] = []
    claimed: list[str] = []

    def measured(script):
        async def call(keys, args):
            reply = await script(keys=keys, args=args)
            values = [*args, *(value for one in reply if isinstance(one, list) for value in one)]
            sizes.append(sum(len(value) for value in values if isinstance(value, bytes)))
            if script is claim and len(sizes) == 2:
                raise TimeoutError
            return reply

        return call

    def adopt(one):
        taker.checkpoint(one.id).register(b"")
        claimed.append(one.id)

    claim, lost._write_script = taker._claim_script, measured(lost._write_script)
    taker._claim_script = measured(claim)
    await lost.start(lambda _: None)
    answers = [lost.checkpoint(f"of{number % 2}:{number}") for number in range(24)]
    for answer in answers:
        answer.register(b"x" * 990_000)
    assert all([await answer.is_owned() for answer in answers])
    await lost.close()
    record(f"calls of at most {max(sizes) / MIB:.1f} MiB")
    assert max(sizes) < 5 * MIB
    sizes.clear()
    monkeypatch.setattr(taker, "up", True)
    for _ in range(2):
        await taker._claim(adopt)
    assert sorted(claimed) == sorted(answer.id for answer in answers)
    assert 0 < max(sizes) < 5 * MIB
    await taker.close()


async def test_large_requests_of_some_owners_hold_up_no_answer_of_another(valkey, monkeypatch):
    """Before the fix, a call had the requests of all, and the next one tried the same again."""
    monkeypatch.setattr("llmops.gateway.conversations.checkpoints.RETRY_INTERVAL", 0.01)
    store = CheckpointStore(valkey.url, 0.5)
    write = store._write_script

    async def slow_with_large_calls(keys, args):
        if sum(len(one) for one in args if isinstance(one, bytes)) > 500_000:
            raise TimeoutError
        return await write(keys=keys, args=args)

    store._write_script = slow_with_large_calls
    await store.start(lambda _: None)
    for number in range(24):
        store.checkpoint(f"evil{number % 3}:{number}").register(b"x" * 990_000)
    victims = [store.checkpoint(f"victim:{number}") for number in range(2)]
    victims[0].register(b"record")
    await eventually(lambda: not store.up)
    victims[1].register(b"record")
    with Redis.from_url(valkey.url) as client:
        for number in range(2):
            await eventually(lambda key=f"{PREFIX}:answer:victim:{number}": client.hget(key, "record") == b"record")
    await store.close()


async def test_a_request_that_redis_takes_too_slowly_is_not_sent_for_ever(valkey, monkeypatch):
    """Before the fix, no lost answer was taken over meanwhile, and the readers of all answers were let go."""
    monkeypatch.setattr("llmops.gateway.conversations.checkpoints.RETRY_INTERVAL", 0.01)
    lost, store = CheckpointStore(valkey.url, 0.4), CheckpointStore(valkey.url, 0.4)
    write = store._write_script

    async def slow_with_large_calls(keys, args):
        replies = await write(keys=keys, args=args)
        if sum(len(one) for one in args if isinstance(one, bytes)) > 500_000:
            raise TimeoutError
        return replies

    store._write_script = slow_with_large_calls
    claimed = asyncio.get_running_loop().create_future()
    await store.start(claimed.set_result)
    slow = store.checkpoint("evil:slow")
    slow.register(b"x" * 990_000)
    slow.add([1], None)
    await eventually(lambda: not slow.registered)
    assert not slow.lost
    assert not slow.holds
    await lost.start(lambda _: None)
    answer = lost.checkpoint("victim:lost")
    answer.register(b"record")
    assert await answer.is_owned()
    await lost.close()
    assert (await claimed).id == "victim:lost"
    with Redis.from_url(valkey.url) as client:
        assert not client.exists(f"{PREFIX}:answer:evil:slow")
    assert await slow.finish(b"{}")
    await store.close()


async def test_tokens_of_many_answers_do_not_hold_up_a_new_answer(monkeypatch):
    """Before the fix, the new answer reached Redis only once fewer than MAX_BATCH answers ran."""
    store, done, calls = CheckpointStore("redis://127.0.0.1:1", 5.0), asyncio.Event(), []
    running = [store.checkpoint(f"running:{number}") for number in range(3 * MAX_BATCH)]
    new = store.checkpoint("new:answer")

    async def write(keys: list[str], args: list) -> list[int]:
        calls.append(args[2::7])
        if len(calls) == 5:
            new.register(b"record")
        for one in running:
            one.add([1], None)
        if len(calls) == 20:
            done.set()
        await asyncio.sleep(0)
        return [0] * len(calls[-1])

    monkeypatch.setattr(store, "_write_script", write)
    await store._try(store._write, [])
    for one in running:
        one.register(b"record")
    task = asyncio.create_task(store._write_forever())
    await done.wait()
    task.cancel()
    assert any("new:answer" in sent for sent in calls)


async def test_a_large_request_is_not_read_for_each_token_or_search_for_its_gateway(valkey):
    """Before the fix, 100 answers with requests of 0.9 MB blocked Valkey for 130 ms per token."""
    store = CheckpointStore(valkey.url, GENEROUS)
    await store.start(lambda _: None)
    answer = store.checkpoint("of:answer")
    answer.register(b"x" * 900_000)
    answer.add([1], None)
    await eventually(lambda: answer.known == 4)
    with Redis.from_url(valkey.url) as client, client.monitor() as monitor:
        sent = client.info("stats")["total_net_output_bytes"]
        answer.add([2], None)
        await eventually(lambda: answer.known == 8)
        assert await store.usage_owners(["of:answer"]) == {"of:answer": UsageOwner.OFFERED}
        assert client.info("stats")["total_net_output_bytes"] - sent < 100_000
        client.ping()
        commands = [next(monitor.listen())["command"]]
        while commands[-1] != "PING":
            commands.append(next(monitor.listen())["command"])
    assert any(command.startswith("SETRANGE") for command in commands)
    assert not [command for command in commands if command.startswith(("HMGET", "HGET ")) and "record" in command]
    await store.close()


async def test_long_answers_that_are_read_elsewhere_hold_up_no_reader_of_another(valkey):
    """Before the fix, one call had the tokens of 256 answers, and each next call tried the same again."""
    writer, reader = CheckpointStore(valkey.url, GENEROUS), CheckpointStore(valkey.url, GENEROUS)
    for store in writer, reader:
        await store.start(lambda _: None)
    answers = [writer.checkpoint(f"evil:{number}") for number in range(20)] + [writer.checkpoint("victim:0")]
    for answer in answers:
        answer.register(b"record")
        answer.add([1] * 30_000, None)
    await eventually(lambda: all(answer.known == 120_000 for answer in answers))
    read = reader._read_script

    async def slow_with_large_calls(keys, args):
        replies = await read(keys=keys, args=args)
        if sum(len(tokens) for tokens, _ in replies) > 1_000_000:
            raise TimeoutError
        return replies

    reader._read_script = slow_with_large_calls
    got = {answer.id: b"" for answer in answers}

    def deliver(news, answer_id):
        got[answer_id] += news[0] if news else b""

    for answer in answers:
        reader.follow(FollowedTokens(answer.id, partial(deliver, answer_id=answer.id)))
    await eventually(lambda: all(len(tokens) == 120_000 for tokens in got.values()))
    answers[-1].add([2], None)
    await eventually(lambda: len(got["victim:0"]) == 120_004)
    for store in writer, reader:
        await store.close()


async def test_an_answer_that_valkey_has_just_lost_is_not_billed_for_the_lost_gateways_part(valkey):
    """Before the fix, a search for dead gateways' outboxes in the moment after the flush billed that part."""
    lost, taker, searcher = (CheckpointStore(valkey.url, 0.5) for _ in range(3))
    claimed = asyncio.get_running_loop().create_future()
    await lost.start(lambda _: None)
    answer = lost.checkpoint("of:answer")
    answer.register(b"record")
    assert await answer.is_owned()
    await taker.start(claimed.set_result)
    await lost.close()
    taken = taker.checkpoint((await claimed).id)
    with Redis.from_url(valkey.url) as client:
        client.flushall()
    assert set((await searcher.usage_owners(["of:answer", "of:none"])).values()) == {UsageOwner.OFFERED}
    taken.register(b"")
    await taken.is_owned()

    async def is_decided() -> bool:
        owners = await searcher.usage_owners(["of:answer", "of:none"])
        return owners == {"of:answer": UsageOwner.ELSEWHERE, "of:none": UsageOwner.HERE}

    await eventually(is_decided)
    await taker.close()
    await searcher.close()


async def test_damaged_answers_in_valkey_end_no_others(told, valkey, tmp_path, monkeypatch):
    """Before the fix, no answer of the lost gateway went on, and readers at other gateways lost all of theirs."""
    monkeypatch.setattr("llmops.gateway.usage.usage_check.ADOPT_INTERVAL", 0.1)
    told.wait = 0.05
    settings = shared(told, valkey, tmp_path, "1s")
    readers = [ResumingReader(question, OPENAI) for question in ("Tokens?", "Record?", "Where is it?")]
    async with serving(settings) as (other, _):
        async with serving(settings) as (one, _):
            for reader in readers:
                await reader.read(one, 4)
            tokens, record, good = readers
            again = ResumingReader("Where is it?", OPENAI)
            again.run = good.run
            following = asyncio.create_task(again.read(other))
            await asyncio.sleep(0.2)
            with Redis.from_url(valkey.url) as client:
                (key,) = client.keys(f"*:tokens:*{tokens.run}")
                client.delete(key)
                client.lpush(key, "x")
                (key,) = client.keys(f"*:answer:*{record.run}")
                client.hdel(key, "record")
            await asyncio.sleep(0.2)
        async with asyncio.timeout(GENEROUS):
            assert await good.whole(other) == told.text("Where is it?")
            await following
            assert again.text == good.text
            await all_are_billed(settings, readers)
    assert (await billed(settings))[good.run] == 40


async def test_readers_of_a_damaged_end_or_request_in_valkey_end(told, valkey, tmp_path, monkeypatch):
    """Before the fix, a reader waited for ever or got a 500, and the lost gateway's events waited for an hour."""
    monkeypatch.setattr("llmops.gateway.usage.usage_check.ADOPT_INTERVAL", 0.1)
    told.wait = 0.1
    settings = shared(told, valkey, tmp_path, "1s")
    readers = [ResumingReader(question, OPENAI) for question in ("End?", "Request?", "Nested?")]
    async with serving(settings) as (other, _):
        async with serving(settings) as (one, _):
            for reader in readers:
                await reader.read(one, 3)
            with Redis.from_url(valkey.url) as client:
                damage = ("end", "{"), ("record", "{"), ("record", "[" * 100_000)
                for reader, (field, value) in zip(readers, damage, strict=True):
                    client.hset(client.keys(f"*:answer:*{reader.run}")[0], field, value)
            answers = [await other.get(f"{OPENAI}/{reader.run}") for reader in readers]
        assert [answer.status_code for answer in answers] == [200, 410, 410]
        assert "is damaged; send the request again." in answers[0].text
        await all_are_billed(settings, readers)


@pytest.fixture
def stores(monkeypatch):
    """The stores of running answers of all gateways, in the order of their start. None takes answers over."""
    started, start = [], CheckpointStore.start

    async def noted(self, adopt):
        started.append(self)
        monkeypatch.setattr(self, "lease", GENEROUS)
        await start(self, adopt)
        monkeypatch.setattr(self, "lease", 0.5)

    monkeypatch.setattr(CheckpointStore, "start", noted)
    return started


async def test_a_gateway_that_stood_still_bills_what_it_sent_before_its_client_continued_elsewhere(
    told, valkey, tmp_path, monkeypatch, stores
):
    """Before the fix, it took the continuation for a takeover, and the first tokens were on no bill."""
    monkeypatch.setattr("llmops.gateway.conversations.conversation_store.LOST_AFTER", 0.2)
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.SAVE_INTERVAL", 0.01)
    told.wait = 0.5
    settings = shared(told, valkey, tmp_path, "0.5s")
    async with serving(settings) as (one, _), serving(settings) as (other, _):
        talk = (await one.post("/api/conversations", json={})).json()["id"]
        reader = ResumingReader("Where is it?", conversation_id=talk)
        await reader.read(one, 4)
        await stores[0]._tasks.cancel()

        async def is_lost() -> bool:
            messages = (await other.get(f"/api/conversations/{talk}")).json()["messages"]
            with Redis.from_url(valkey.url) as client:
                lease = client.zscore(f"{PREFIX}:gateways", stores[0]._gateway)
                return messages[-1]["status"] == "incomplete" and lease < client.time()[0] * 1000

        await eventually(is_lost)
        told.wait = 0
        body = {"model": "tiny", "messages": [], "continue_final_message": True, "conversation_id": talk}
        continued = await other.post("/api/chat/completions", json={**body, "stream": False})
        assert continued.json()["id"] == reader.run
        stores[0]._tasks.start(stores[0]._write_forever())

        async def bills() -> list[tuple[str, int]]:
            async with await open_store(settings.store) as store:
                return sorted((row["finish_reason"], row["output_tokens"]) for row in await billed_rows(store))

        async def are_billed() -> bool:
            return len(await bills()) == 2

        await eventually(are_billed)
        (part, first), (rest, tokens) = await bills()
        record(f"{first} tokens of the gateway that stood still, {tokens} of the other")
        assert (part, rest) == ("cancelled", "stop")
        assert first >= 3
        assert tokens == continued.json()["usage"]["completion_tokens"]


async def test_a_gateway_that_stood_still_until_valkey_forgot_its_answer_does_not_go_on_with_it(valkey):
    """Before the fix, it wrote over the text of the gateway that had taken the answer over, and charged it again."""
    still, taker = CheckpointStore(valkey.url, 0.5), CheckpointStore(valkey.url, 0.5)
    claimed = asyncio.get_running_loop().create_future()
    await still.start(lambda _: None)
    answer = still.checkpoint("of:answer")
    answer.register(b"record")
    assert await answer.is_owned()
    await still._tasks.cancel()
    await taker.start(claimed.set_result)
    taken = taker.checkpoint((await claimed).id)
    taken.register(b"")
    assert await taken.finish(b"{}")
    with Redis.from_url(valkey.url) as client:
        client.delete(f"{PREFIX}:answer:of:answer", f"{PREFIX}:tokens:of:answer")
        billed = client.get(f"{PREFIX}:billed:of:answer")
    await still._write([answer])
    assert answer.lost
    await still.close()
    # a Valkey restored from a snapshot of this time ends no answer that began since, as it did before a fix
    continued = taker.checkpoint("of:answer")
    continued.register(b"continuation")
    assert await continued.is_owned()
    with Redis.from_url(valkey.url) as client:
        client.delete(f"{PREFIX}:answer:of:answer")
        client.set(f"{PREFIX}:billed:of:answer", billed)
    assert await continued.is_owned()
    await taker.close()


async def test_an_answer_that_began_while_valkey_was_away_goes_on_elsewhere_after_its_return(
    told, tmp_path, monkeypatch, caplog
):
    """Before the fix, it was never written to Valkey: a call that took too long once cost later readers a 410."""
    monkeypatch.setattr("llmops.gateway.conversations.checkpoints.TIMEOUT", 0.5)
    told.wait = 0.5
    with Valkey() as own:
        settings = shared(told, own, tmp_path, "1s")
        async with serving(settings) as (other, _):
            async with serving(settings) as (one, _):
                own.kill()
                await eventually(lambda: caplog.text.count("running answers are lost") == 2)
                short = ResumingReader("Short?", OPENAI, max_tokens=2)
                await short.whole(one)
                reader = ResumingReader("Where is it?", OPENAI)
                await reader.read(one, 3)
                told.wait = 0
                own.start()
                with Redis.from_url(own.url) as client:
                    await eventually(lambda: client.keys(f"*:answer:*{reader.run}"))
                    assert not client.keys(f"*:answer:*{short.run}")
            assert await reader.whole(other) == told.text("Where is it?")
        assert await billed(settings) == {reader.run: 40, short.run: 2}


async def test_a_valkey_restored_from_a_snapshot_changes_no_answer_that_has_ended(told, valkey, tmp_path):
    """Before the fix, another gateway wrote over the texts, and made a completed response a cancelled one."""
    told.wait = 0.1
    settings = shared(told, valkey, tmp_path, "0.5s")
    async with serving(settings) as (other, _):
        async with serving(settings) as (one, _):
            talk = (await one.post("/api/conversations", json={})).json()["id"]
            readers = [ResumingReader("Where is it?", conversation_id=talk), BackgroundReader("When?")]
            for reader in readers:
                await reader.read(one, 5)
            with Redis.from_url(valkey.url) as client:
                snapshot = {key: (client.dump(key), max(client.pttl(key), 0)) for key in client.scan_iter()}
            for reader in readers:
                await reader.whole(one)

            async def stored() -> list[dict]:
                paths = (f"/api/conversations/{talk}", f"/v1/responses/{readers[1].run}")
                return [(await other.get(path)).json() for path in paths]

            ended, asked = await stored(), len(told.triton.requests)
            assert [ended[0]["messages"][-1]["status"], ended[1]["status"]] == ["completed"] * 2
            with Redis.from_url(valkey.url) as client:
                for key, (value, milliseconds) in snapshot.items():
                    client.restore(key, milliseconds, value, replace=True)
        await eventually(lambda: len(told.triton.requests) == asked + 2)
        await eventually(lambda: told.triton.active == 0)
        with Redis.from_url(valkey.url) as client:
            await eventually(lambda: all(client.hget(key, "end") for key in client.keys("*:answer:*")))
        assert await stored() == ended
    assert await billed(settings) == {reader.run: 40 for reader in readers}


async def test_an_end_that_redis_has_not_is_written_before_its_continuation(valkey, monkeypatch):
    """Before the fix, the continuation took its place, and another gateway generated the ended answer again."""
    store = CheckpointStore(valkey.url, 0.5)
    await store.start(lambda _: None)
    ended = store.checkpoint("of:answer")
    ended.register(b"record")
    assert await ended.is_owned()

    async def away(*_, **__):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", away)
        ended.add([1], None)
        await eventually(lambda: not store.up)
        assert await ended.finish(b"{}")
        store.checkpoint("of:answer").register(b"continuation")
    await eventually(lambda: store.up)
    await store.close()
    with Redis.from_url(valkey.url) as client:
        assert client.hget(f"{PREFIX}:answer:of:answer", "end") == b"{}"


async def test_answers_go_on_elsewhere_although_their_store_is_away(told, valkey, tmp_path, monkeypatch):
    """Before the fix, the gateway that had taken them over gave them up."""
    told.wait = 0.5
    settings = shared(told, valkey, tmp_path, "0.5s")
    found = [SqlResponses.find, StoredAnswer.find]

    async def away(*_):
        raise UnavailableError("away")

    async def away_once(*_):
        monkeypatch.setattr(StoredAnswer, "find", found[1])
        raise UnavailableError("away")

    async with serving(settings) as (other, _):
        async with serving(settings) as (one, _):
            talk = (await one.post("/api/conversations", json={})).json()["id"]
            readers = [ResumingReader("Where is it?", conversation_id=talk), BackgroundReader("When?")]
            for reader in readers:
                await reader.read(one, 5)
            asked, told.wait = len(told.triton.requests), 0
            monkeypatch.setattr(SqlResponses, "find", away)
            monkeypatch.setattr(StoredAnswer, "find", away_once)
        await eventually(lambda: len(told.triton.requests) == asked + 2)
        monkeypatch.setattr(SqlResponses, "find", found[0])
        assert [await one.whole(other) for one in readers] == [told.text("Where is it?"), told.text("When?")]
        message = (await other.get(f"/api/conversations/{talk}")).json()["messages"][-1]
        response = (await other.get(f"/v1/responses/{readers[1].run}")).json()
        assert [message["status"], response["status"]] == ["completed"] * 2


class EndedRun(AnswerRun):
    """An answer of 2,000 deltas that has ended; its readers note the pieces that they render."""

    usage = Usage(0)
    pieces: ClassVar[list[str]] = []

    def __init__(self, owner):
        super().__init__("chatcmpl-" + "0" * 24, owner, form=None)
        for _ in range(2_000):
            self.log.append(ContentDelta("word"))
        self.visible, self.over, self.finish = len(self.log), True, "stop"

    async def stop(self):
        return

    def enter(self):
        self.readers += 1

    def leave(self):
        self.readers -= 1

    def role(self, index):
        return b"role"

    def piece(self, index, piece):
        return b"piece"

    def end(self, run):
        return b"end"


class NotingReader(AnswerReader):
    def _rendered(self):
        EndedRun.pieces.append(self._run.owner)
        return super()._rendered()


@pytest.mark.parametrize("answers", [32, 1])
async def test_replays_of_many_users_of_a_tenant_take_turns_with_other_tenants(answers):
    """Before the fix, one pass of the event loop rendered 32 whole replays."""
    EndedRun.pieces.clear()
    runs = [EndedRun(f"evil{number}") for number in range(answers)]
    seen = {}

    async def replay(run, share):
        reader = NotingReader(run, run, -1)
        await reader.start(SimpleNamespace(caller=SimpleNamespace(share=share)))
        seen[reader] = b""
        while (data := await reader.next()) is not None:
            seen[reader] += data
        reader.close()
        return Counter(EndedRun.pieces)

    evil = [asyncio.create_task(replay(runs[at % answers], f"evil/{at}")) for at in range(32)]
    while not EndedRun.pieces:
        await asyncio.sleep(0)
    victim = asyncio.create_task(replay(EndedRun("victim"), "victim/key"))
    most = 0
    while not victim.done():
        before = len(EndedRun.pieces)
        await asyncio.sleep(0)
        most = max(most, len(EndedRun.pieces) - before)
    assert most <= 2
    rendered = victim.result()
    assert rendered.total() <= 3 * rendered["victim"] + 4
    for task in evil:
        task.cancel()
    await asyncio.gather(*evil, return_exceptions=True)
    assert max(seen.values(), key=len).count(b"piece") == 2_000


async def test_answers_of_other_gateways_become_text_in_turns():
    """Before the fix, one pass of the event loop read 256 tokens of each of 16 answers."""
    fed = []
    choice = SimpleNamespace(feed=lambda batch: fed.append(1) or [], sort=lambda pieces: pieces)
    batches = [[1]] * 2_000
    reading = [asyncio.create_task(replay_batches(choice, batches, AnswerLog(), f"evil/{at}")) for at in range(16)]
    victim = asyncio.create_task(replay_batches(choice, batches, AnswerLog(), "victim/key"))
    most = 0
    while not victim.done():
        before = len(fed)
        await asyncio.sleep(0)
        most = max(most, len(fed) - before)
    assert most <= 2 * REPLAY_TURN
    assert len(fed) <= 3 * len(batches) + 4 * REPLAY_TURN
    await asyncio.gather(*reading)
    assert len(fed) == 17 * len(batches)
