"""Usage: each event once, sums that agree with the rows, gaps that are found; on both databases."""

import asyncio
import logging
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from unittest.mock import Mock
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select, text

from llmops.control.metrics import MAX_SERIES, OTHERS_LABEL, SpendingCollector
from llmops.control.store_access import SharedStore
from llmops.errors import InputError, ResourceError
from llmops.gateway.errors import ModelNotPricedError, UnavailableError
from llmops.gateway.interfaces import Usage
from llmops.gateway.usage.billing import Bill, Billing
from llmops.store import usage_queries, usage_writes
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.accounts.tenants import update_tenant
from llmops.store.audit import list_audit_entries
from llmops.store.factory import open_store
from llmops.store.prices import Price, list_prices, set_price
from llmops.store.tables import tenant_totals, usage_records
from llmops.store.usage_queries import UsageFilter, find_sequence_gaps, high_water_mark, sum_usage
from llmops.store.usage_writes import UsageRecord
from tests.store.control_client import BY, make_key
from tests.support.accounts import add_key
from tests.support.usage_rows import fill, insert_usage
from tests.support.waiting import Clock

USER = str(UUID(int=1))


def event(by, seq, gateway="g1", **changes):
    """37 tokens in, 32 of them cached, 7 out, 12 micro-dollars."""
    made = UsageRecord(
        id=str(UUID(int=(crc32(gateway.encode()) << 64) + seq)), gateway_id=gateway, seq=seq, created_at=by.at,
        request_id=f"chatcmpl-{seq}", user_id=USER, model="smollm2", input_tokens=37, cached_tokens=32,
        output_tokens=7, cost_micros=12,
    )  # fmt: skip
    return made._replace(**changes)


async def test_every_field_of_an_event_is_kept(store, by):
    full = event(
        by, 0, key_id="key-1", price_id="smollm2@2026-11-01T00:00:00Z", version="3", replica="triton-0:8001",
        status=499, finish_reason="gateway_lost", ttft_ms=41, latency_ms=212, priority="standard", migrations=2,
        reasoning_tokens=3,
    )  # fmt: skip
    async with store.write() as connection:
        assert await insert_usage(connection, [full]) == 1
    async with store.read() as connection:
        row = (await connection.execute(select(usage_records))).mappings().one()
    assert UsageRecord(**row) == full


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_in_whatever_batches_events_come_the_books_are_the_same(data, by, newest_file, folder):
    """Against a set of what has arrived, counted in Python; the mark moves page by page of three."""
    sent = data.draw(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=6))
    file = folder / "store.db"
    file.write_bytes(newest_file.read_bytes())

    async def run():
        arrived = set()
        async with await open_store(f"sqlite:///{file}") as store:
            for batch in sent:
                async with store.write() as connection:
                    new = await insert_usage(connection, [event(by, seq) for seq in batch])
                assert new == len(set(batch) - arrived)
                arrived |= set(batch)
            async with store.read() as connection:
                [total] = await sum_usage(connection, UsageFilter())
                mark, missing = await high_water_mark(connection, "g1"), await find_sequence_gaps(connection)
        assert (total.requests, total.cost_micros) == (len(arrived), 12 * len(arrived))
        assert mark == next(seq for seq in range(32) if seq not in arrived)
        holes = [seq for gap in missing for seq in range(gap.first, gap.last + 1)]
        assert holes == [seq for seq in range(max(arrived, default=0)) if seq not in arrived]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage_writes, "GAP_PAGE_SIZE", 3)
        asyncio.run(run())


async def test_the_gaps_of_one_gateway_hide_no_other(store, by, monkeypatch):
    """Before the fix, the first thousand gaps of a gateway with invented numbers left no room for others."""
    monkeypatch.setattr(usage_queries, "MAX_SEQUENCE_GAPS", 3)
    async with store.write() as connection:
        for gateway, seqs in {"g1": (1, 3, 5, 7), "g2": (0, 2)}.items():
            await insert_usage(connection, [event(by, seq, gateway) for seq in seqs])
    async with store.read() as connection:
        gaps = await find_sequence_gaps(connection)
    assert [(gap.gateway_id, gap.first, gap.last) for gap in gaps] == [("g1", 0, 0), ("g1", 2, 2), ("g2", 1, 1)]


async def test_the_bill_of_a_whole_answer_replaces_that_of_a_part(store, by):
    """Before the fix, an answer whose gateway was taken for lost was billed for its first tokens only."""
    part = event(by, 0, finish_reason="gateway_lost")
    later = by.at + timedelta(days=1)
    whole = part._replace(gateway_id="g2", created_at=later, output_tokens=600, cost_micros=900, finish_reason="stop")
    other = [one._replace(id=str(UUID(int=1)), seq=1) for one in (whole, part)]

    async def write(records):
        async with store.write() as connection:
            await insert_usage(connection, records)

    await write([part])
    await asyncio.gather(*(write([whole]) for _ in range(4)))
    await write([part])
    # both in one batch
    await write(other)
    async with store.read() as connection:
        rows = (await connection.execute(select(usage_records).order_by(usage_records.c.seq))).mappings().all()
        totals = await sum_usage(connection, UsageFilter())
        spent = await connection.scalar(select(func.sum(tenant_totals.c.cost_micros)))
        marks = [await high_water_mark(connection, gateway) for gateway in ("g1", "g2")]
    assert [UsageRecord(**row) for row in rows] == [whole._replace(gateway_id="g1", created_at=by.at), other[0]]
    assert [(one.requests, one.output_tokens, one.cost_micros) for one in totals] == [(2, 1200, 1800)]
    assert (spent, marks) == (1800, [2, 2])


async def test_a_damaged_part_keeps_no_other_from_being_replaced(store, by, caplog):
    parts = [event(by, seq, finish_reason="gateway_lost") for seq in range(3)]
    async with store.write() as connection:
        if connection.dialect.name != "sqlite":
            pytest.skip("only SQLite stores values of any type")
        await insert_usage(connection, parts)
        for seq, change in enumerate(("output_tokens = 'abc'", "created_at = 'abc'")):
            await connection.execute(text(f"UPDATE usage_records SET {change} WHERE seq = {seq}"))
    async with store.write() as connection:
        await insert_usage(connection, [one._replace(output_tokens=600, finish_reason="stop") for one in parts])
    async with store.read() as connection:
        assert await connection.scalar(select(usage_records.c.output_tokens).where(usage_records.c.seq == 2)) == 600
    assert caplog.text.count("is damaged, so its answer is billed in part only") == 2


async def test_writers_with_the_same_events_do_not_lock_each_other_out(store, by):
    """Six writers, each with all of 200 events in an order and in batches of its own."""
    events = [event(by, seq // 3, f"g{seq % 3}", model=f"m{seq % 7}") for seq in range(200)]

    async def write(seed):
        mine = random.Random(seed).sample(events, len(events))
        new = 0
        for begin in range(0, len(mine), 50):
            async with store.write() as connection:
                new += await insert_usage(connection, mine[begin : begin + 50])
        return new

    assert sum(await asyncio.gather(*map(write, range(6)))) == 200
    async with store.read() as connection:
        assert (await sum_usage(connection, UsageFilter()))[0].requests == 200
        assert [await high_water_mark(connection, f"g{one}") for one in range(3)] == [67, 67, 66]
        assert await find_sequence_gaps(connection) == []


# -- Tests of what tokens cost, compared with figures computed by hand, on both databases


tokens = st.integers(0, 2**31 - 1)
micros = st.integers(0, 10**12)


def price(by, model="smollm2", days=0.0, into=600_000, cached=300_000, out=900_000):
    return Price(model, by.at + timedelta(days=days), into, cached, out)


@given(uncached=tokens, cached=tokens, out=tokens, into=micros, kept=micros, made=micros)
def test_cost_is_the_exact_sum_rounded_half_up_once(uncached, cached, out, into, kept, made, by):
    exact = Fraction(uncached * into, 10**6) + Fraction(cached * kept, 10**6) + Fraction(out * made, 10**6)
    cost = price(by, into=into, cached=kept, out=made).tariff(uncached + cached, cached, out)
    assert isinstance(cost, int)
    assert Fraction(-1, 2) <= exact - cost < Fraction(1, 2)


async def test_a_price_to_come_can_be_changed_and_one_in_force_cannot(store, by):
    coming = price(by, days=1)
    async with store.write() as connection:
        await set_price(connection, coming, by)
        cheaper = replace(coming, output_micros=1)
        await set_price(connection, cheaper, by)
        assert await list_prices(connection) == [cheaper]
        with pytest.raises(InputError, match="cannot begin in the past"):
            await set_price(connection, coming, replace(by, at=coming.valid_from + timedelta(seconds=1)))
        logged = await list_audit_entries(connection)
    assert [entry.subject for entry in logged] == ["smollm2@2026-11-23T13:30:00Z"] * 2
    assert {entry.detail["output_micros"] for entry in logged} == {1, 900_000}


# -- Tests of the cost of requests at a gateway, on both databases


# $0.60, $0.30 and $0.90 per million tokens
CENTS = (600_000, 300_000, 900_000)
# 5 x 0.6 + 32 x 0.3 + 7 x 0.9 = 18.9 micro-dollars
USED, COST = Usage(37, 7, 0, 32), 19
# the same, as a tariff is asked
TOKENS = (37, 32, 7)


@asynccontextmanager
async def billing_on(url: str, now: Clock):
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
    now = Clock(by.at)
    async with billing_on(url, now) as billing:
        first, second = Bill(COST, "tiny@2026-11-22T13:30:00Z"), Bill(7, "tiny@2026-12-01T13:30:00Z")
        assert billing.bill("tiny", USED) == first
        now.now = later - timedelta(microseconds=1)
        assert billing.bill("tiny", USED) == first
        now.now = later
        assert billing.bill("tiny", USED) == second
        # what began before is billed at the price of its time
        assert (billing.bill("tiny", USED, by.at), billing.tariff("tiny")(*TOKENS)) == (first, 7)


async def test_a_price_that_is_read_late_holds_for_requests_that_arrive_after_it_was_read(url, store, by):
    """Before the fix, a budget that had reserved by the old price was billed by the new one, 100 times as high."""
    set_at, read_at = by.at + timedelta(seconds=1), by.at + timedelta(seconds=20)
    old, new = Price("tiny", by.at, *CENTS), Price("tiny", set_at, *(100 * each for each in CENTS))
    await priced(store, by, old)
    now = Clock(by.at)
    async with billing_on(url, now) as billing:
        await priced(store, replace(by, at=set_at), new)
        now.now = arrived = by.at + timedelta(seconds=10)
        reserved = billing.tariff("tiny", arrived)(*TOKENS)
        now.now = read_at
        await billing.refresh()
        assert billing.bill("tiny", USED, arrived).micros == reserved == COST
        assert billing.bill("tiny", USED, read_at).price_id == new.id


async def test_a_price_is_not_replaced_when_gateways_may_have_read_it(url, store, by):
    """Before the fix, a request at 25 s cost by the replaced price, or by the one before once the new one was read."""
    old, coming = Price("tiny", by.at, *CENTS), Price("tiny", by.at + timedelta(minutes=2), 10**6, 10**6, 10**6)
    dearer = replace(coming, output_micros=10**7)
    await priced(store, by, old, coming)
    await priced(store, replace(by, at=by.at + timedelta(seconds=60)), dearer)
    now = Clock(by.at + timedelta(seconds=90))
    async with billing_on(url, now) as billing:
        with pytest.raises(InputError, match="13:32:00 UTC cannot be replaced in the last minute"):
            await priced(store, replace(by, at=by.at + timedelta(seconds=61)), coming)
        now.now = arrived = by.at + timedelta(seconds=125)
        assert billing.bill("tiny", USED, arrived) == Bill(37 + 70, dearer.id)
        now.now = by.at + timedelta(seconds=130)
        await billing.refresh()
        assert billing.bill("tiny", USED, arrived) == Bill(37 + 70, dearer.id)


async def test_a_price_that_was_read_late_costs_requests_one_look(url, store, by):
    """Before the fix, each request looked at all prices that its model ever had."""
    old = [Price("tiny", by.at + timedelta(seconds=one), *CENTS) for one in range(9)]
    async with billing_on(url, Clock(by.at + timedelta(seconds=20))) as billing:
        for one in old:
            await priced(store, by, one)
        await billing.refresh()
        billing._read_late = looked = Mock(wraps=billing._read_late)
        assert (billing.bill("tiny", USED).price_id, looked.get.call_count) == (old[-1].id, 1)


async def test_cached_tokens_have_their_price_where_the_engine_tells(url, store, by):
    await priced(store, by, Price("tiny", by.at, *CENTS))
    async with billing_on(url, Clock(by.at)) as billing:
        # an engine that counts more than there was is not believed
        assert [billing.tariff("tiny")(1000, cached, 0) for cached in (1000, 0, 4000)] == [300, 600, 300]


async def test_a_model_without_a_price_costs_nothing_is_told_once_and_takes_no_budget(url, store, by, caplog):
    async with billing_on(url, Clock(by.at)) as billing:
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
    users = [(await add_key(store, email[4:], email))[2] for email in ("ann@acme", "bob@acme", "zoe@zeta")]
    spent = [(0, "key-a", 0, 5), (0, "key-b", 0, 70), (1, "key-c", 0, 900), (2, "key-z", 0, 1), (0, "key-a", 2, 30)]
    async with store.write() as connection:
        for seq, (user, key, days, micros) in enumerate(spent):
            at = by.at - timedelta(days=days)
            own = event(by, seq, user_id=users[user], key_id=key, created_at=at, cost_micros=micros)
            await insert_usage(connection, [own])
    midnight = datetime.combine(date(2026, 11, 22), datetime.min.time(), UTC)
    async with billing_on(url, Clock(by.at)) as billing:
        expected = {"key-a": [5, 35], "tenant acme": [975, 1005], "tenant zeta": [1, 1], "key-new": [0, 0]}
        for of, sums in expected.items():
            assert [await billing.spent(of, midnight - timedelta(days=days)) for days in (0, 2)] == sums, of


async def test_a_store_that_goes_away_leaves_the_prices(own_postgres, by, caplog):
    url, stop, start = own_postgres
    async with await open_store(url) as store:
        await priced(store, by, Price("tiny", by.at, *CENTS))
    now = Clock(by.at)
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
        now.now = later.at
        assert billing.tariff("tiny")(*TOKENS) == 0
    told = [record.message for record in caplog.records if record.message.startswith("Prices")]
    assert [one.partition(" (")[0].rstrip(".") for one in told].count("Prices can be read again") == 2
    assert sum("cannot be read" in one for one in told) == 2
    assert "not-a-secret" not in caplog.text


# -- Tests of the spending that control exports to Prometheus


NOW = datetime(2026, 9, 10, 12, tzinfo=UTC)


def record(number: int, user: str, cost: int, day: int = 3, model: str = "tiny") -> UsageRecord:
    at = NOW.replace(day=1) + timedelta(days=day)
    return UsageRecord(str(UUID(int=number + 1)), "g1", number, at, f"r{number}", user, model, 100, 20, cost, 60)


async def told(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    store = SharedStore(url)
    spending = SpendingCollector(store, lambda: NOW)
    await spending.refresh()
    await store.close()
    return {one.name: {tuple(at.labels.values()): at.value for at in one.samples} for one in spending.collect()}


async def test_it_is_the_month_of_the_ledger(url):
    _, _, acme = await make_key(url, "acme")
    _, _, zeta = await make_key(url, "zeta")
    await fill(
        url, record(0, acme, 1_500_000), record(1, acme, 250_000, model="big"), record(2, zeta, 4_000_000, model="big"),
        # last month's
        record(3, zeta, 9_000_000, day=-3),
    )  # fmt: skip
    async with await open_store(url) as store, store.write() as connection:
        await update_tenant(connection, "acme", Limits(budget=Budget(7_000_000, "month")), BY)
        await update_tenant(connection, "zeta", Limits(budget=Budget(1_000_000, "day")), BY)
    found = await told(url)
    assert found["llmops_spent_dollars"] == {("acme",): 1.75, ("zeta",): 4.0}
    assert found["llmops_model_spent_dollars"] == {("tiny",): 1.5, ("big",): 4.25}
    assert found["llmops_spent_tokens"] == {
        ("acme", "input"): 80, ("acme", "cached"): 120, ("acme", "output"): 40,
        ("zeta", "input"): 40, ("zeta", "cached"): 60, ("zeta", "output"): 20,
    }  # fmt: skip
    # zeta's day is another one than that of its usage
    assert found["llmops_budget_used_ratio"] == {("acme",): 0.25, ("zeta",): 0.0}


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_tenants_that_spend_little_share_a_series(url, kind):
    spent = {}
    for number in range(MAX_SERIES + 5):
        _, _, user = await make_key(url, f"t{number:02}")
        spent[f"t{number:02}"] = number + 1.0
        await fill(url, record(number, user, (number + 1) * 10**6))
    found = {tenant: value for (tenant,), value in (await told(url))["llmops_spent_dollars"].items()}
    assert len(found) == MAX_SERIES + 1
    assert found == {name: value for name, value in spent.items() if value > 5} | {OTHERS_LABEL: 1 + 2 + 3 + 4 + 5}
