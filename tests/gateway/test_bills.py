"""Budgets and bills of keys in a real store: no restart refills the ones, and no row of the others is missing."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from llmops.errors import ResourceError
from llmops.gateway.api.resumable_chats import AnswerRecord
from llmops.gateway.conversations.database import Database
from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import Caller
from llmops.gateway.usage import usage_check
from llmops.gateway.usage.ledger_sink import LedgerSink
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.audit import AuditContext
from llmops.store.factory import open_store
from llmops.store.prices import Price, set_price
from llmops.store.usage_writes import UsageRecord
from tests.support.accounts import add_key
from tests.support.gateway_stack import BODIES, CHAT, RESPONSES, running
from tests.support.scripted_triton import Step
from tests.support.usage_rows import billed_rows, insert_usage
from tests.support.waiting import eventually

# micro-dollars a token: $1,000 per million, and $2,000 per million
INPUT, OUTPUT = 1000, 2000
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}


class Account:
    """One user of `acme`, and what the ledger has of them."""

    def __init__(self, store, url: str, by: AuditContext, user: str) -> None:
        self.store, self.url, self.by, self.user = store, url, by, user
        self.seq = 0

    async def key(self, micros: int | None) -> tuple[str, dict[str, str]]:
        limits = Limits(budget=Budget(micros, "month") if micros else None)
        secret, key, _ = await add_key(self.store, "acme", by=self.by, limits=limits)
        return key, {"authorization": f"Bearer {secret}"}

    async def price(self, since: datetime | None = None, factor: float = 1) -> None:
        into, out = (int(factor * each * 10**6) for each in (INPUT, OUTPUT))
        async with self.store.write() as connection:
            await set_price(connection, Price("tiny", since or self.by.at, into, into, out), self.by)

    async def rows(self, key: str) -> list:
        return [row for row in await billed_rows(self.store) if row["key_id"] == key]

    async def used(self, key: str, micros: int) -> None:
        now, self.seq = datetime.now(UTC), self.seq + 1
        record = UsageRecord(str(uuid4()), "g", self.seq, now, "r", self.user, "tiny", 1, 1, micros, key_id=key)
        async with self.store.write() as connection:
            await insert_usage(connection, [record])


@pytest.fixture
async def account(tmp_path):
    url, by = (f"sqlite:///{tmp_path}/store.db", AuditContext("cli:tester", datetime.now(UTC) - timedelta(seconds=1)))
    async with await open_store(url) as store:
        async with store.write() as connection:
            await create_tenant(connection, "acme", Limits(budget=Budget(10**9, "day")), by)
            user = (await ensure_user(connection, "acme", "ann@acme", by)).id
        yield Account(store, url, by, user)


@pytest.fixture
def gateway(card, tokenizer, account, tmp_path):
    @asynccontextmanager
    async def started():
        """Anew, with limits that know nothing of the time before."""
        usage = {"outbox": tmp_path / "usage"}
        async with running({**card, "max_batch_size": 8}, tokenizer, store=account.url, port=0, usage=usage) as stack:
            stack.steps(*[Step((9,))] * 6, Step(final=True))
            yield stack

    return started


async def test_a_budget_pays_for_so_many_tokens_and_a_restart_does_not_refill_it(account, gateway):
    await account.price()
    _, free = await account.key(None)
    async with gateway() as stack:
        prompt = (await stack.client.post(CHAT, json=BODY, headers=free)).json()["usage"]["prompt_tokens"]
        _, headers = await account.key(2 * (prompt * INPUT + 6 * OUTPUT) + 999)
        assert (await stack.client.post(CHAT, json=BODY, headers=headers)).status_code == 200
        await stack.idle()
        cut = await stack.client.post(CHAT, json=BODY, headers=headers)
        # not 50: what the rest of the budget pays for
        assert stack.triton.requests[-1]["request_output_len"] == [6]
        assert cut.json()["choices"][0]["finish_reason"] == "length"
        await stack.idle()
        await refused(stack, headers, "The budget of key-")
    async with gateway() as stack:
        await refused(stack, headers, "The budget of key-")


async def test_a_budget_counts_what_dead_gateways_left_while_the_ledger_takes_nothing(account, gateway, monkeypatch):
    async def refuse(*_):
        raise ResourceError("The store is held by another process.")

    monkeypatch.setattr(LedgerSink, "write", refuse)
    monkeypatch.setattr(usage_check, "DRAIN_TIMEOUT", 0.1)
    await account.price()
    _, headers = await account.key(60 * INPUT + 12 * OUTPUT)
    answered = []
    for _ in range(3):
        async with gateway() as stack:
            answered.append(0)
            while (await stack.client.post(CHAT, json=BODY, headers=headers)).status_code == 200:
                answered[-1] += 1
                await stack.idle()
    assert answered[0] > 0
    assert answered[1:] == [0, 0]


async def test_a_price_that_falls_while_a_body_arrives_holds_for_what_came_before(account, gateway):
    """Before the fix, a budget was asked for the low price and billed by the high one, which no page showed."""
    await account.price()
    falls = datetime.now(UTC) + timedelta(seconds=3)
    await account.price(falls, 0.01)
    async with gateway() as stack:
        key, headers = await account.key(60 * INPUT)

        async def body():
            yield b" "
            await asyncio.sleep((falls - datetime.now(UTC)).total_seconds() + 0.1)
            yield json.dumps({**BODY, "max_tokens": 200}).encode()

        headers["content-type"] = "application/json"
        answer = (await stack.client.post("/api/chat/completions", content=body(), headers=headers)).json()
        assert stack.triton.requests[-1]["request_output_len"][0] < 30
        await stack.idle()
    (row,) = await account.rows(key)
    assert row["cost_micros"] == answer["usage"]["prompt_tokens"] * INPUT + 6 * OUTPUT == answer["cost_usd"] * 1e6


async def test_a_tenants_budget_bounds_all_of_its_keys(account, gateway):
    await account.price()
    _, headers = await account.key(None)
    await account.used("key-other", 10**9 - 1)
    async with gateway() as stack:
        await refused(stack, headers, "The budget of tenant acme, $1,000.00 a day, has too little left")


async def test_what_the_gateway_gives_up_before_its_answer_costs_nothing(account, gateway, monkeypatch):
    """Before the fix, requests with 503 were billed as "499 cancelled", and all took from the budget."""

    async def full(*_):
        raise UnavailableError("The disk is full.")

    await account.price()
    _, free = await account.key(None)
    async with gateway() as stack:
        six = {**BODY, "max_tokens": 6}
        prompt = (await stack.client.post(CHAT, json=six, headers=free)).json()["usage"]["prompt_tokens"]
        key, headers = await account.key(prompt * INPUT + 6 * OUTPUT)
        whole, stack.triton.script = stack.triton.script, lambda _: [Step(error="out of memory")]
        assert (await stack.client.post(CHAT, json=six, headers=headers)).status_code == 500
        await stack.idle()
        stack.triton.script = whole
        talk = (await stack.client.post("/api/conversations", json={}, headers=headers)).json()["id"]
        chat = {**six, "conversation_id": talk}
        background = {**BODIES[RESPONSES], "background": True, "max_output_tokens": 6}
        with monkeypatch.context() as patch:
            patch.setattr(Database, "write", full)
            for path, body in [("/api/chat/completions", chat), (RESPONSES, background)]:
                for stream in (False, True):
                    answer = await stack.client.post(path, json={**body, "stream": stream}, headers=headers)
                    assert answer.status_code == 503
                    await stack.idle()
        answer = (await stack.client.post(CHAT, json=six, headers=headers)).json()
        assert answer["usage"]["completion_tokens"] == 6
    assert [row["status"] for row in await account.rows(key)] == [200]


async def test_what_a_shutdown_ends_before_its_client_got_any_of_it_costs_nothing(account, gateway):
    await account.price()
    key, headers = await account.key(None)
    async with gateway() as stack:
        stack.steps(Step(hang=True))
        body = {**BODIES[RESPONSES], "background": True}
        begun = (await stack.client.post(RESPONSES, json=body, headers=headers)).json()
        asked = [asyncio.create_task(stack.client.post(CHAT, json={**BODY, "stream": True}, headers=headers))]
        await eventually(lambda: stack.triton.active == 2)
        stack.steps(Step((9,)), Step(hang=True))
        asked.append(asyncio.create_task(stack.client.post(CHAT, json=BODY, headers=headers)))
        await eventually(lambda: stack.triton.active == 3)
    assert ([one.status_code for one in await asyncio.gather(*asked)], await account.rows(key)) == ([500, 500], [])
    async with gateway() as stack:
        assert (await stack.client.get(f"{RESPONSES}/{begun['id']}", headers=headers)).json()["status"] == "failed"


async def test_a_client_that_leaves_before_the_first_token_pays_for_the_prompt(account, gateway):
    await account.price()
    key, headers = await account.key(None)
    async with gateway() as stack:
        stack.steps(Step(hang=True))
        asking = asyncio.create_task(stack.client.post("/api/chat/completions", json=BODY, headers=headers))
        await eventually(lambda: stack.triton.active)
        asking.cancel()
        await stack.idle()
    assert [(row["status"], row["output_tokens"]) for row in await account.rows(key)] == [(499, 0)]


async def test_a_budget_does_not_pay_for_a_model_without_a_price(account, gateway):
    _, headers = await account.key(10**9)
    async with gateway() as stack:
        answer = await stack.client.post(CHAT, json=BODY, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_priced")
        assert (answer.headers["x-should-retry"], stack.triton.requests) == ("false", [])


async def test_litellm_31866_a_request_writes_no_counter_of_the_database(account, gateway):
    """A key with all limits and a budget: what a hundred requests cost the store does not grow with them."""
    await account.price()
    key, headers = await account.key(10**9)
    statements: list[str] = []
    async with gateway() as stack:
        await stack.client.post(CHAT, json=BODY, headers=headers)

        def count(_connection, _cursor, statement, *_) -> None:
            statements.append(statement.split()[0])

        event.listen(Engine, "before_cursor_execute", count)
        try:
            for _ in range(10):
                asked = (stack.client.post(CHAT, json=BODY, headers=headers) for _ in range(10))
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        finally:
            event.remove(Engine, "before_cursor_execute", count)
    assert len(await account.rows(key)) == 101
    # rows go in batches, one after another, each with its sums: not one statement for each request
    assert statements.count("UPDATE") + statements.count("INSERT") < 100


async def refused(stack, headers, why: str) -> None:
    answer = await stack.client.post(CHAT, json=BODY, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (429, "insufficient_quota", "insufficient_quota")
    assert answer.headers["x-should-retry"] == "false"
    assert error["message"].startswith(why)


def test_an_answer_that_is_taken_over_costs_what_it_did_when_it_began():
    """Before the fix, a price that rose before a takeover billed the whole answer at the new price."""
    began = datetime.now(UTC) - timedelta(hours=1)
    known = {"model": "tiny", "body": {}, "created": 0, "prompt_tokens": 1, "max_tokens": 1}
    record = AnswerRecord(caller=Caller(), **known, arrived=began)
    assert AnswerRecord.decode(record.model_dump_json().encode()).context().arrived == began
