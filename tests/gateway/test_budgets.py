"""Budgets of keys in a real store, by its prices: what they pay for, and that nothing refills them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from gateway_conftest import Step, running

from llmops.store.accounts.keys import KeySpec, create_key
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.audit import By
from llmops.store.open import open_store
from llmops.store.prices import Price, set_price
from llmops.store.usage import UsageRecord, insert_usage

CHAT = "/v1/chat/completions"
# micro-dollars a token: $1,000 per million, and $2,000 per million
INPUT, OUTPUT = 1000, 2000
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}


class Account:
    """One user of `acme`, and what the ledger has of them."""

    def __init__(self, store, url: str, by: By, user: str) -> None:
        self.store, self.url, self.by, self.user = store, url, by, user
        self.seq = 0

    async def key(self, micros: int | None) -> tuple[str, dict[str, str]]:
        limits = Limits(budget=Budget(micros, "month") if micros else None)
        async with self.store.write() as connection:
            user = await ensure_user(connection, "acme", "ann@acme", self.by)
            key, secret = await create_key(connection, user, KeySpec(limits=limits), self.by)
        return key.id, {"authorization": f"Bearer {secret}"}

    async def price(self) -> None:
        async with self.store.write() as connection:
            await set_price(
                connection, Price("tiny", self.by.at, INPUT * 10**6, INPUT * 10**6, OUTPUT * 10**6), self.by
            )

    async def used(self, key: str, micros: int) -> None:
        now, self.seq = datetime.now(timezone.utc), self.seq + 1
        record = UsageRecord(str(uuid4()), "g", self.seq, now, "r", self.user, "tiny", 1, 1, micros, key_id=key)
        async with self.store.write() as connection:
            await insert_usage(connection, [record])


@pytest.fixture
async def account(tmp_path):
    url, by = f"sqlite:///{tmp_path}/store.db", By("cli:tester", datetime.now(timezone.utc) - timedelta(seconds=1))
    async with await open_store(url) as store:
        async with store.write() as connection:
            await create_tenant(connection, "acme", Limits(budget=Budget(10**6, "day")), by)
            user = (await ensure_user(connection, "acme", "ann@acme", by)).id
        yield Account(store, url, by, user)


@pytest.fixture
def gateway(card, tokenizer, account):
    @asynccontextmanager
    async def started():
        """Anew, with limits that know nothing of the time before."""
        async with running(card, tokenizer, store=account.url, port=0) as stack:
            stack.steps(*[Step((9,))] * 6, Step(final=True))
            yield stack

    return started


async def test_a_budget_pays_for_so_many_tokens_and_a_restart_does_not_refill_it(account, gateway):
    await account.price()
    _, free = await account.key(None)
    async with gateway() as stack:
        prompt = (await stack.client.post(CHAT, json=BODY, headers=free)).json()["usage"]["prompt_tokens"]
        once = prompt * INPUT + 6 * OUTPUT
        key, headers = await account.key(2 * once + 999)
        assert (await stack.client.post(CHAT, json=BODY, headers=headers)).status_code == 200
        await stack.idle()
        cut = await stack.client.post(CHAT, json=BODY, headers=headers)
        # not 50: what the rest of the budget pays for
        assert stack.triton.requests[-1]["request_output_len"] == [6]
        assert cut.json()["choices"][0]["finish_reason"] == "length"
        await stack.idle()
        await refused(stack, headers, "The budget of key-")
    await account.used(key, 2 * once)
    async with gateway() as stack:
        await refused(stack, headers, "The budget of key-")


async def test_a_tenants_budget_bounds_all_of_its_keys(account, gateway):
    await account.price()
    key, headers = await account.key(None)
    await account.used("key-other", 10**6 - 1)
    async with gateway() as stack:
        await refused(stack, headers, "The budget of tenant acme, $1.00 a day, is used up")
    assert key


async def test_a_budget_does_not_pay_for_a_model_without_a_price(account, gateway):
    _, headers = await account.key(10**9)
    async with gateway() as stack:
        answer = await stack.client.post(CHAT, json=BODY, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_priced")
        assert answer.headers["x-should-retry"] == "false"
        assert stack.triton.requests == []


async def refused(stack, headers, why: str) -> None:
    answer = await stack.client.post(CHAT, json=BODY, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (429, "insufficient_quota", "insufficient_quota")
    assert answer.headers["x-should-retry"] == "false"
    assert error["message"].startswith(why)
