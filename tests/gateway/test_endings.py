"""However an answer ends: its outcome, its usage event and its quota have what its client was told, once."""

import asyncio
import json
import sqlite3
from uuid import UUID

import pytest

from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Caller, Outcome, Quota, TokenStream, Usage, UsageEvent
from llmops.gateway.ratelimit.buckets import Limit, LimitRequest
from llmops.gateway.ratelimit.limits import RateLimits
from llmops.gateway.ratelimit.memory import InMemoryLimiter
from llmops.gateway.ratelimit.rate_limit_check import RateLimitCheck
from llmops.gateway.settings import Quotas, UsageSettings
from llmops.gateway.usage.open_answers import read_slots
from llmops.gateway.usage.sink import NoPrices, UsageSink
from llmops.gateway.usage.usage_check import UsageCheck
from llmops.store.factory import open_store
from tests.gateway.test_door import Watch
from tests.support.gateway_stack import BODIES, CHAT, COMPLETIONS, END, MESSAGES, RESPONSES, running
from tests.support.scripted_triton import Step
from tests.support.usage_rows import billed_rows
from tests.support.waiting import eventually

ANN = str(UUID(int=7))
LIMIT = 10**6
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


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
        context.caller = Caller("acme", ANN, "key-a", "acme/key-a", tier="pro", quotas=(Quota("key-a", tpm=LIMIT),))


class Counted:
    """A gateway whose requests are watched, limited and billed; the limits' clock stands still."""

    def __init__(self, stack, watch: Watch, gate: RateLimits, usage: UsageCheck, ledger: Kept) -> None:
        self.stack, self.watch, self.gate, self.usage, self.ledger = stack, watch, gate, usage, ledger
        self.post, self.events, self.left = stack.client.post, 0, LIMIT

    @property
    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the answers that have ended."""
        return [outcome for _, outcome in self.watch.heard if outcome.finish]

    async def billed(self, count: int) -> list[UsageEvent]:
        """Return the events of all answers, of which there are `count`."""
        await self.stack.idle()
        await eventually(lambda: not self.gate.open and len(self.ledger.events) >= count)
        # what comes twice or too much would come now
        await self.usage.settle(10)
        await self.stack.client.get("/health/live")
        assert len(self.ledger.events) == count
        return sorted(self.ledger.events.values(), key=lambda one: one.seq)

    async def ended(self) -> tuple[Outcome, UsageEvent]:
        """Return the outcome and the event of the only answer since the last call, which cost its quota as much."""
        self.events += 1
        event = (await self.billed(self.events))[-1]
        assert len(self.outcomes) == self.events
        outcome = self.outcomes[-1]
        now = self.gate.limiter.reserve_now([Limit("key-a::", tokens=LIMIT)], [LimitRequest()]).decision.left[0][1]
        self.left, cost = now, self.left - now
        assert cost == event.input_tokens + event.output_tokens
        assert (outcome.usage, outcome.finish) == (Usage(event.input_tokens, event.output_tokens), event.finish_reason)
        return outcome, event


@pytest.fixture
async def counted(card, tokenizer, tmp_path):
    watch, ledger, gate = Watch(), Kept(), RateLimits(InMemoryLimiter(lambda: 0.0), None, lambda: 0.0)
    usage = UsageCheck(tmp_path / "usage", UsageSettings(), ledger, NoPrices())
    await usage.start()
    checks = [Ann(), watch, RateLimitCheck(gate, Quotas()), usage]
    async with running({**card, "max_batch_size": 8, "max_seq_len": 8192}, tokenizer, checks=checks) as stack:
        yield Counted(stack, watch, gate, usage, ledger)
    await usage.close()
    await gate.close()


def told(body: dict) -> Usage:
    """Return the token counts in an answer of any API."""
    usage = body["usage"]
    names = ("input_tokens", "output_tokens") if "input_tokens" in usage else ("prompt_tokens", "completion_tokens")
    return Usage(*(usage[name] for name in names))


async def streamed(counted: Counted, path: str, body: dict) -> list[dict]:
    async with counted.stack.client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def test_every_api_streamed_or_not(counted):
    counted.stack.say("Hello world! How are you?")
    for path, body in BODIES.items():
        answer = (await counted.post(path, json=body)).json()
        outcome, event = await counted.ended()
        assert outcome == Outcome(200, "stop", told(answer))
        assert min(told(answer)[:2]) > 0
        assert event.request_id == answer["id"]
        assert (event.tenant_id, event.user_id, event.key_id, event.model) == ("acme", ANN, "key-a", "tiny")
        assert (event.status, event.priority) == (200, "pro")
        assert 0 <= event.ttft_ms <= event.latency_ms
        options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
        events = [one.get("response", one) for one in await streamed(counted, path, {**body, **options})]
        assert (await counted.ended())[0] == outcome
        assert told([one for one in events if one.get("usage")][-1]) == outcome.usage


async def test_several_answers_stop_strings_lengths_and_calls(counted):
    ids = counted.stack.tokenizer.encode("Hello world! How are you?")
    for path, fields, reason in [
        (CHAT, {"n": 4}, "stop"),
        (COMPLETIONS, {"n": 2, "prompt": ["Hello", "world"]}, "stop"),
        (CHAT, {"stop": "How"}, "stop"),
        (CHAT, {"max_tokens": 3}, "length"),
        (RESPONSES, {"store": False}, "stop"),
        (CHAT, {"tools": [TOOL]}, "tool_calls"),
    ]:
        if "tools" in fields:
            counted.stack.say('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
        else:
            sequences = range(fields.get("n", 1))
            steps = [Step((one,), sequence=at) for one in ids[: fields.get("max_tokens")] for at in sequences]
            ends = [Step((END,), sequence=at) for at in sequences] if reason == "stop" else []
            counted.stack.steps(*steps, *ends, Step(final=True))
        answer = await counted.post(path, json={**BODIES[path], **fields})
        assert (await counted.ended())[0] == Outcome(200, reason, told(answer.json()))


async def test_an_engine_that_breaks(counted):
    broken, lost = Step(error="CUDA error", final=True), Step(drop=True)
    for step, finish, status in ((broken, "error", 500), (lost, "engine_lost", 503)):
        counted.stack.steps(Step((9,)), Step((9,)), step)
        for path in (CHAT, RESPONSES):
            answer = await counted.post(path, json=BODIES[path])
            usage = Usage(len(counted.stack.triton.requests[-1]["input_ids"]), 2)
            outcome, event = await counted.ended()
            assert outcome == Outcome(status, finish, usage)
            assert answer.status_code == event.status == status
            await streamed(counted, path, BODIES[path])
            assert (await counted.ended())[0] == Outcome(200, finish, usage)


async def test_who_leaves_pays_for_what_came(counted):
    counted.stack.say("Hello", Step(hang=True))
    for path in (CHAT, RESPONSES):
        async with counted.stack.client.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
            async for line in response.aiter_lines():
                if '"content":"' in line or "output_text.delta" in line:
                    break
        outcome, event = await counted.ended()
        assert (outcome.status, outcome.finish, event.status) == (200, "cancelled", 499)
        assert 1 <= event.output_tokens <= len(counted.stack.tokenizer.encode("Hello"))


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_background_response_is_over_when_it_is_done(counted, streaming):
    go = asyncio.Event()

    async def script(tensors):
        yield Step((9,))
        await go.wait()
        for step in (Step((9,)), Step((END,)), Step(final=True)):
            yield step

    counted.stack.triton.script = script
    body = {**BODIES[RESPONSES], "background": True, "stream": streaming}
    async with counted.stack.client.stream("POST", RESPONSES, json=body) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                break
    await eventually(lambda: counted.stack.triton.active)
    await counted.stack.client.get("/health/live")
    assert counted.outcomes == []
    go.set()
    outcome, event = await counted.ended()
    done = (await counted.stack.client.get(f"{RESPONSES}/{event.request_id}")).json()
    assert outcome == Outcome(200, "stop", told(done))


async def test_a_background_response_that_is_cancelled(counted):
    counted.stack.steps(Step((9,)), Step(hang=True))
    begun = (await counted.post(RESPONSES, json={**BODIES[RESPONSES], "background": True})).json()
    await eventually(lambda: counted.stack.triton.active)
    await counted.post(f"{RESPONSES}/{begun['id']}/cancel")
    _, event = await counted.ended()
    assert (event.request_id, event.status, event.finish_reason) == (begun["id"], 499, "cancelled")


async def test_the_event_is_written_before_the_answer_ends(counted):
    """Whoever has the end of an answer can be sure that it is on the bill, though the gateway is killed then."""
    counted.stack.say("Hello")
    slots = counted.usage.worker.lock.folder / "open-answers"
    async with counted.stack.client.stream("POST", CHAT, json={**BODIES[CHAT], "stream": True}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                left = read_slots(slots)
                assert (left.unfinished, len(left.ended) + counted.usage.worker.outbox.last_place) == ([], 1)
    assert (await counted.ended())[1].finish_reason == "stop"


async def test_what_fails_before_its_first_token_is_nobodys_to_pay(counted):
    counted.stack.steps(Step(error="out of memory"))
    assert (await counted.post(CHAT, json=BODIES[CHAT])).status_code == 500
    assert (await counted.post(CHAT, json={**BODIES[CHAT], "n": 99})).status_code == 400
    counted.stack.say("Hello")
    await counted.post(CHAT, json=BODIES[CHAT])
    assert [event.status for event in await counted.billed(1)] == [200]


async def test_what_the_engine_had_in_its_cache_is_told_and_billed_alike_with_where_it_ended(counted, monkeypatch):
    monkeypatch.setattr(TokenStream, "replica", "triton-1:8001")
    monkeypatch.setattr(TokenStream, "splices", {"exact": 1, "approximate": 2})
    monkeypatch.setattr(TokenStream, "cached_tokens", 3)
    counted.stack.say("Hello")
    chat = (await counted.post(CHAT, json=BODIES[CHAT])).json()["usage"]
    assert chat["prompt_tokens_details"] == {"cached_tokens": 3, "audio_tokens": 0}
    response = (await counted.post(RESPONSES, json=BODIES[RESPONSES])).json()["usage"]
    assert response["input_tokens_details"]["cached_tokens"] == 3
    # Anthropic's input_tokens are those that were not in a cache
    message = (await counted.post(MESSAGES, json=BODIES[MESSAGES])).json()["usage"]
    assert (message["cache_read_input_tokens"], message["input_tokens"]) == (3, chat["prompt_tokens"] - 3)
    events = await counted.billed(3)
    assert {(event.input_tokens, event.cached_tokens) for event in events} == {(chat["prompt_tokens"], 3)}
    assert {(event.replica, event.migrations) for event in events} == {("triton-1:8001", 3)}


@pytest.mark.parametrize(("when_full", "status"), [("refuse", 503), ("serve", 200)])
async def test_no_room_for_usage(counted, monkeypatch, when_full, status):
    """Open answers are finished, and their events wait for room.

    Later requests are rejected, or served all the same.
    """

    def full(events):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(counted.usage._settings, "when_full", when_full)
    counted.stack.say("Hello")
    with monkeypatch.context() as patch:
        patch.setattr(counted.usage.worker.outbox, "add", full)
        assert (await counted.post(CHAT, json=BODIES[CHAT])).status_code == 200
        await eventually(lambda: counted.usage.worker.writer.trouble)
        answer = await counted.post(CHAT, json=BODIES[CHAT])
        assert answer.status_code == status
        if status == 503:
            assert answer.json()["error"]["code"] == "usage_unavailable"
            # what needs no bill goes on
            assert (await counted.stack.client.get("/v1/models")).status_code == 200
    # there is room again
    assert (await counted.post(CHAT, json=BODIES[CHAT])).status_code == 200
    assert {event.finish_reason for event in await counted.billed(2 if status == 503 else 3)} == {"stop"}


async def test_rows_of_a_store_anonymous_and_priced_by_the_ledger(card, tokenizer, tmp_path):
    """A gateway with a store removes its folder when the ledger has all events."""
    url = f"sqlite:///{tmp_path}/store.db"
    async with running(card, tokenizer, store=url, open=True, usage={"outbox": tmp_path / "usage"}) as stack:
        stack.say("Hello world!")
        answer = (await stack.chat()).json()
        async with await open_store(url) as store:
            await eventually(lambda: billed_rows(store))
            (row,) = await billed_rows(store)
    assert (row["user_id"], Usage(row["input_tokens"], row["output_tokens"])) == (str(UUID(int=0)), told(answer))
    assert (row["key_id"], row["price_id"], row["cost_micros"]) == (None, None, 0)
    assert list((tmp_path / "usage").iterdir()) == []
