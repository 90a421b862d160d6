"""Tests of the cost of requests at a gateway, on both databases.

They cover the store's prices at their times, and what was spent.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import pytest

from llmops.errors import ResourceError
from llmops.gateway.errors import ModelNotPricedError, UnavailableError
from llmops.gateway.interfaces import Usage
from llmops.gateway.usage.billing import Bill, Billing
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.factory import open_store
from llmops.store.prices import Price, set_price
from llmops.store.usage_writes import UsageRecord, insert_usage

# $0.60, $0.30 and $0.90 per million tokens
CENTS = (600_000, 300_000, 900_000)
# 5 x 0.6 + 32 x 0.3 + 7 x 0.9 = 18.9 micro-dollars
USED, COST = Usage(37, 7, 0, 32), 19
# the same, as a tariff is asked
TOKENS = (37, 32, 7)


class Now:
    def __init__(self, at: datetime) -> None:
        self.at = at

    def __call__(self) -> datetime:
        return self.at


@asynccontextmanager
async def billing_on(url: str, now: Now):
    billing = Billing(url, now)
    try:
        await billing.refresh()
        yield billing
    finally:
        await billing.close()


async def priced(store, by, *prices: Price) -> None:
    async with store.write() as connection:
        for price in prices:
            await set_price(connection, price, by)


async def test_each_price_holds_from_its_moment_on_without_another_look(url, store, by):
    later = by.at + timedelta(days=9)
    await priced(store, by, Price("tiny", later, 1, 1, 10**6), Price("tiny", by.at, *CENTS))
    now = Now(by.at)
    async with billing_on(url, now) as billing:
        first, second = Bill(COST, "tiny@2026-11-22T13:30:00Z"), Bill(7, "tiny@2026-12-01T13:30:00Z")
        assert billing.bill("tiny", USED) == first
        now.at = later - timedelta(microseconds=1)
        assert billing.bill("tiny", USED) == first
        now.at = later
        assert billing.bill("tiny", USED) == second
        # what began before is billed at the price of its time
        assert billing.bill("tiny", USED, by.at) == first
        assert billing.tariff("tiny")(*TOKENS) == 7


async def test_cached_tokens_have_their_price_where_the_engine_tells(url, store, by):
    await priced(store, by, Price("tiny", by.at, *CENTS))
    async with billing_on(url, Now(by.at)) as billing:
        assert billing.tariff("tiny")(1000, 1000, 0) == 300
        assert billing.tariff("tiny")(1000, 0, 0) == 600
        # an engine that counts more than there was is not believed
        assert billing.tariff("tiny")(1000, 4000, 0) == 300


async def test_a_model_without_a_price_costs_nothing_is_told_once_and_takes_no_budget(url, store, by, caplog):
    now = Now(by.at)
    async with billing_on(url, now) as billing:
        for _ in range(3):
            assert billing.bill("tiny", USED) == Bill(0, None)
        assert [record.message for record in caplog.records if "no price" in record.message] == [
            "The model 'tiny' has no price and is billed as $0; `llmops price set` gives it one."
        ]
        with pytest.raises(ModelNotPricedError, match="no budget can pay for it") as refused:
            billing.tariff("tiny")
        assert (refused.value.status, refused.value.code) == (403, "model_not_priced")
        await priced(store, by, Price("tiny", by.at, 0, 0, 0))
        await billing.refresh()
        # free is a price
        billing.tariff("tiny")
        assert billing.bill("tiny", USED) == Bill(0, "tiny@2026-11-22T13:30:00Z")


async def test_what_was_spent_is_the_keys_or_the_tenants_own(url, store, by):
    async with store.write() as connection:
        await create_tenant(connection, "acme", Limits(), by)
        await create_tenant(connection, "zeta", Limits(), by)
        users = [(await ensure_user(connection, "acme", f"{name}@acme", by)).id for name in ("ann", "bob")]
        users.append((await ensure_user(connection, "zeta", "zoe@zeta", by)).id)
        spent = [(0, "key-a", 0, 5), (0, "key-b", 0, 70), (1, "key-c", 0, 900), (2, "key-z", 0, 1), (0, "key-a", 2, 30)]
        for seq, (user, key, days, micros) in enumerate(spent):
            record = UsageRecord(
                str(UUID(int=seq)), "g", seq, by.at - timedelta(days=days), "r", users[user], "tiny", 1, 1, micros,
                key_id=key,
            )  # fmt: skip
            await insert_usage(connection, [record])
    midnight = datetime.combine(date(2026, 11, 22), datetime.min.time(), UTC)
    async with billing_on(url, Now(by.at)) as billing:
        assert await billing.spent("key-a", midnight) == 5
        assert await billing.spent("key-a", midnight - timedelta(days=2)) == 35
        assert await billing.spent("tenant acme", midnight) == 975
        assert await billing.spent("tenant acme", midnight - timedelta(days=2)) == 1005
        assert await billing.spent("tenant zeta", midnight) == 1
        assert await billing.spent("key-new", midnight) == 0


async def test_a_store_that_goes_away_leaves_the_prices(own_postgres, by, caplog):
    url, stop, start = own_postgres
    async with await open_store(url) as store:
        await priced(store, by, Price("tiny", by.at, *CENTS))
    now = Now(by.at)
    async with billing_on(url, now) as billing:
        stop()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await billing.refresh()
            assert billing.tariff("tiny")(*TOKENS) == COST
            with pytest.raises(ResourceError):
                await billing.spent("key-a", by.at)
            fresh = Billing(url, now)
            await fresh.refresh()
            with pytest.raises(UnavailableError) as refused:
                fresh.tariff("tiny")
            assert (refused.value.status, refused.value.code) == (503, "prices_unavailable")
            assert fresh.bill("tiny", USED) == Bill(0, None)
            start()
            await fresh.refresh()
            fresh.tariff("tiny")
            await fresh.close()
            later = replace(by, at=by.at + timedelta(seconds=1))
            async with await open_store(url) as store:
                await priced(store, later, Price("tiny", later.at, 0, 0, 0))
            await billing.refresh()
        now.at = later.at
        assert billing.tariff("tiny")(*TOKENS) == 0
    told = [record.message for record in caplog.records if record.message.startswith("Prices")]
    assert [one.partition(" (")[0].rstrip(".") for one in told].count("Prices can be read again") == 2
    assert sum("cannot be read" in one for one in told) == 2
    assert "not-a-secret" not in caplog.text
