"""Usage: each event once, sums that agree with the rows, gaps that are found; on both databases."""

from __future__ import annotations

import asyncio
import random
from datetime import date, timedelta, timezone
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from llmops.store import usage_writes
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.factory import open_store
from llmops.store.tables import usage_records
from llmops.store.usage_queries import (
    SequenceGap,
    UsageFilter,
    UsageSum,
    find_sequence_gaps,
    high_water_mark,
    spent_micros,
    sum_usage,
)
from llmops.store.usage_writes import UsageRecord, insert_usage

USER = str(UUID(int=1))


def event(by, seq, gateway="g1", **changes):
    """37 tokens in, 32 of them cached, 7 out, 12 micro-dollars."""
    made = UsageRecord(
        id=str(UUID(int=(crc32(gateway.encode()) << 64) + seq)),
        gateway_id=gateway,
        seq=seq,
        created_at=by.at,
        request_id=f"chatcmpl-{seq}",
        user_id=USER,
        model="smollm2",
        input_tokens=37,
        cached_tokens=32,
        output_tokens=7,
        cost_micros=12,
    )
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


async def test_an_event_that_comes_again_changes_nothing(store, by):
    events = [event(by, seq) for seq in range(5)]
    async with store.write() as connection:
        assert await insert_usage(connection, [*events[:3], events[0]]) == 3
    async with store.write() as connection:
        assert await insert_usage(connection, [*events, events[1]._replace(id=events[1].id.upper())]) == 2
        assert await insert_usage(connection, []) == 0
        assert (await sum_usage(connection, UsageFilter()))[0] == UsageSum({}, 5, 185, 160, 35, 0, 60)
        assert await high_water_mark(connection, "g1") == 5


async def test_sums_by_tenant_user_model_key_and_day(store, by):
    async with store.write() as connection:
        await create_tenant(connection, "acme", Limits(), by)
        await create_tenant(connection, "zeta", Limits(), by)
        ann, bob, zoe = [
            (await ensure_user(connection, tenant, email, by)).id
            for tenant, email in [("acme", "ann@a.example"), ("acme", "bob@a.example"), ("zeta", "zoe@z.example")]
        ]
        # 00:30 in Berlin is still the day before in UTC
        berlin = by.at.replace(hour=0, minute=30, tzinfo=timezone(timedelta(hours=1)))
        events = [
            event(by, 0, user_id=ann, key_id="key-a"),
            event(by, 1, user_id=ann, key_id="key-b", cost_micros=100, created_at=berlin),
            event(by, 2, user_id=bob, model="llama", input_tokens=1, cached_tokens=0),
            event(by, 3, user_id=zoe, output_tokens=1000, reasoning_tokens=900),
            event(by, 4, user_id=str(UUID(int=9))),
        ]
        await insert_usage(connection, events)

        async def costs(by=(), **wanted):
            sums = await sum_usage(connection, UsageFilter(**wanted), by)
            return {tuple(one.group.values()): one.cost_micros for one in sums}

        today, yesterday = date(2026, 11, 22), date(2026, 11, 21)
        assert await costs() == {(): 148}
        # usage without an owner is not lost from sight
        assert await costs(["tenant"]) == {("acme",): 124, ("zeta",): 12, (None,): 12}
        assert await costs(["user", "model"], tenant_id="acme") == {
            ("ann@a.example", "smollm2"): 112,
            ("bob@a.example", "llama"): 12,
        }
        assert await costs(["day"]) == {(yesterday,): 100, (today,): 48}
        assert await costs(["key"], user_id=ann) == {("key-a",): 12, ("key-b",): 100}
        assert await costs(first=today, last=today) == {(): 48}
        assert await costs(last=yesterday) == {(): 100}
        assert await costs(model="llama") == {(): 12}
        assert await costs(tenant_id="nobody") == {(): 0}
        assert await costs(["day"], tenant_id="nobody") == {}
        [zeta] = await sum_usage(connection, UsageFilter(tenant_id="zeta"))
        assert zeta == UsageSum({}, 1, 37, 32, 1000, 900, 12)
        midnight = by.at.replace(hour=0, minute=0)
        assert await spent_micros(connection, midnight, key_id="key-b") == 0
        assert await spent_micros(connection, midnight - timedelta(days=1), key_id="key-b") == 100
        assert await spent_micros(connection, midnight, tenant_id="acme") == 24


async def test_tenants_totals_agree_with_those_of_their_users(store, by):
    """The two that sums are read from, whatever is asked of both."""
    async with store.write() as connection:
        for tenant in ("acme", "zeta"):
            await create_tenant(connection, tenant, Limits(), by)
        known = [
            (await ensure_user(connection, tenant, f"{name}@{tenant}", by)).id
            for tenant in ("acme", "zeta")
            for name in "ab"
        ]
        draw = random.Random(14)
        events = [
            event(
                by, seq, user_id=draw.choice([*known, USER]), model=draw.choice(["tiny", "llama"]), cost_micros=2**seq,
                created_at=by.at - timedelta(days=draw.randint(0, 2)), reasoning_tokens=draw.randint(0, 7),
            )
            for seq in range(40)
        ]  # fmt: skip
        for batch in (events[:15], events[10:30], events[30:]):
            await insert_usage(connection, batch)
        for tenant in (None, "acme", "zeta"):
            wanted = UsageFilter(tenant_id=tenant, first=by.at.date() - timedelta(days=1))
            whole = await sum_usage(connection, wanted, ["tenant", "day", "model"])
            parts = await sum_usage(connection, wanted, ["tenant", "day", "model", "user"])
            assert len(parts) > len(whole) > 2
            for one in whole:
                of_users = [part for part in parts if part.group.items() >= one.group.items()]
                assert one.cost_micros == sum(part.cost_micros for part in of_users)
                assert one.reasoning_tokens == sum(part.reasoning_tokens for part in of_users)
                assert one.requests == sum(part.requests for part in of_users)


async def test_gaps_are_the_numbers_that_have_not_come(store, by):
    async with store.write() as connection:
        await insert_usage(connection, [event(by, seq) for seq in (0, 1, 4, 5, 9)])
        await insert_usage(connection, [event(by, seq, "g2") for seq in (2, 3)])
        assert await find_sequence_gaps(connection) == [
            SequenceGap("g1", 2, 3),
            SequenceGap("g1", 6, 8),
            SequenceGap("g2", 0, 1),
        ]
        assert await find_sequence_gaps(connection, "g2") == [SequenceGap("g2", 0, 1)]
        assert await find_sequence_gaps(connection, limit=1) == [SequenceGap("g1", 2, 3)]
        assert [await high_water_mark(connection, gateway) for gateway in ("g1", "g2", "g3")] == [2, 0, 0]
        await insert_usage(connection, [event(by, 3), event(by, 2), event(by, 0, "g2"), event(by, 1, "g2")])
        assert await find_sequence_gaps(connection) == [SequenceGap("g1", 6, 8)]
        assert [await high_water_mark(connection, gateway) for gateway in ("g1", "g2")] == [6, 4]


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


async def test_an_event_without_an_id_is_refused(store, by):
    async with store.write() as connection:
        for wrong in ("", "not-a-uuid"):
            with pytest.raises(ValueError, match="UUID"):
                await insert_usage(connection, [event(by, 0, id=wrong)])
