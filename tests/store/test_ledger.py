"""Usage by way of a broker, into either database: each event once, whatever is killed in between."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from sqlalchemy import select

from llmops.cli.local_replicas import CheckedReplicas
from llmops.control import ledger as ledger_module
from llmops.control.app import make_leader_jobs
from llmops.control.leader_jobs import run_jobs
from llmops.control.ledger import Ledger
from llmops.errors import InputError, ResourceError
from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.settings import GatewaySettings, KafkaSettings, load_settings
from llmops.gateway.usage.delivery import UsageDelivery
from llmops.gateway.usage.event_formats import encode_event
from llmops.gateway.usage.kafka import KafkaSink, client_options
from llmops.gateway.usage.ledger_sink import ANONYMOUS_USER_ID, LedgerSink
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.usage_check import create_usage_check
from llmops.store.dead_letters import count_dead_letters
from llmops.store.prices import Price, set_price
from llmops.store.tables import usage_records
from llmops.store.usage_queries import UsageFilter, UsageSum, high_water_mark, sum_usage
from tests.support.servers import Broker

KEY = "0123456789abcdef" * 2
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def event(seq: int, gateway: str = "gw-1", **changes) -> UsageEvent:
    made = UsageEvent(
        str(uuid4()), gateway, seq, NOON, f"chatcmpl-{seq}", f"tenant-{seq % 3}", str(UUID(int=7)), "key-a", "tiny", 37
    )
    return made._replace(output_tokens=7, cost_micros=3, price_id="p")._replace(**changes)


@pytest.fixture(scope="session")
def broker() -> Iterator[str]:
    """Yield the address of a broker that tests share, each with a topic of its own.

    The variable `LLMOPS_TEST_KAFKA` names another broker.
    """
    if given := os.environ.get("LLMOPS_TEST_KAFKA"):
        yield given
        return
    with Broker() as own:
        yield own.servers


@pytest.fixture(autouse=True)
def quick_groups(monkeypatch):
    """Shorten sessions, because this broker waits half a session for joining members."""
    monkeypatch.setattr(ledger_module, "SESSION_TIMEOUT_MS", 1000)


@asynccontextmanager
async def at_work(ledger: Ledger):
    """Begun again when it fails, as the leader does: a machine that stands still loses its session."""
    task = asyncio.create_task(run_jobs([ledger]))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def mark(store, gateway: str = "gw-1") -> int:
    async with store.read() as connection:
        return await high_water_mark(connection, gateway)


async def until(store, wanted: int, gateway: str = "gw-1") -> None:
    while await mark(store, gateway) < wanted:
        await asyncio.sleep(0.05)


async def total(store) -> UsageSum:
    async with store.read() as connection:
        return (await sum_usage(connection, UsageFilter()))[0]


async def test_events_arrive_once_whatever_else_is_in_the_topic(broker, store, url):
    kafka = KafkaSettings(servers=broker, topic=f"t{uuid4().hex}", signing_keys=KEY)
    sink = KafkaSink(kafka, LedgerSink(url))
    events = [event(seq) for seq in range(40)]
    await sink.write(events[:20])
    producer = AIOKafkaProducer(**client_options(kafka))
    await producer.start()
    for other in (b"", b"\xff", b'{"specversion":"1.0","type":"com.example"}', b"[]"):
        await producer.send_and_wait(kafka.topic, other)
    await producer.stop()
    await sink.write(events[10:])
    async with at_work(Ledger(kafka, url)):
        await until(store, 40)
    assert await sink.confirmed([one.id for one in events]) == {one.id for one in events}
    # another one goes on where the first told Kafka that it was
    await sink.write([event(40)])
    async with at_work(Ledger(kafka, url)):
        await until(store, 41)
    await sink.close()
    summed = await total(store)
    assert (summed.requests, summed.input_tokens, summed.output_tokens, summed.cost_micros) == (
        41,
        41 * 37,
        41 * 7,
        123,
    )
    async with store.read() as reading:
        assert await count_dead_letters(reading) == {"not signed by a gateway": 4}


async def test_killed_before_it_told_kafka(broker, store, url, monkeypatch):
    """The batch is in the store, and comes again."""
    kafka = KafkaSettings(servers=broker, topic=f"t{uuid4().hex}", signing_keys=KEY)
    sink = KafkaSink(kafka, LedgerSink(url))
    await sink.write([event(seq) for seq in range(10)])
    committed = ledger_module.AIOKafkaConsumer.commit
    monkeypatch.setattr(ledger_module.AIOKafkaConsumer, "commit", _dies)
    ledger = Ledger(kafka, url)
    with pytest.raises(KeyboardInterrupt):
        await ledger.run()
    assert await mark(store) == 10
    monkeypatch.setattr(ledger_module.AIOKafkaConsumer, "commit", committed)
    await sink.write([event(10)])
    async with at_work(ledger):
        await until(store, 11)
    await sink.close()
    assert (await total(store)).requests == 11


async def _dies(*_):
    raise KeyboardInterrupt


async def test_a_broker_that_forgot_what_it_acknowledged_gets_it_again(store, url, tmp_path):
    (tmp_path / "gw-1").mkdir()
    outbox = UsageOutbox(tmp_path / "gw-1")
    with Broker() as own:
        kafka = KafkaSettings(servers=own.servers, topic="t", signing_keys=KEY)
        sink = KafkaSink(kafka, LedgerSink(url))
        delivery = UsageDelivery(outbox, sink, resend_timeout=1.0)
        outbox.add([encode_event(event(seq)) for seq in range(1200)])
        # most of it is with the broker, and no ledger has read it
        delivering = asyncio.create_task(delivery.run())
        while delivery._cursor < 1000:
            await asyncio.sleep(0.05)
        assert delivery.lag(NOON.replace(minute=5)) == 300
        own.kill()
        own.start()
        async with at_work(Ledger(kafka, url)):
            await until(store, 1200)
            await asyncio.wait_for(delivery.drain(), 300)
            assert delivery.lag(NOON.replace(year=2027)) == 0
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
        await sink.close()
    assert (await total(store)).requests == 1200


async def test_a_broker_whose_log_is_shorter_than_what_was_read_of_it(broker, store, url):
    """One that forgot its events, and was told by a ledger that it had read many."""
    kafka = KafkaSettings(servers=broker, topic=f"t{uuid4().hex}", signing_keys=KEY)
    sink = KafkaSink(kafka, LedgerSink(url))
    await sink.write([event(seq) for seq in range(10)])
    before = AIOKafkaConsumer(
        kafka.topic, group_id=ledger_module.CONSUMER_GROUP, enable_auto_commit=False, **client_options(kafka)
    )
    await before.start()
    await before.commit(dict.fromkeys(before.assignment(), 1000))
    await before.stop()
    async with at_work(Ledger(kafka, url)):
        await until(store, 10)
    await sink.close()


async def test_the_ledger_waits_for_its_postgresql(broker, own_postgres):
    url, stop, start = own_postgres
    kafka = KafkaSettings(servers=broker, topic=f"t{uuid4().hex}", signing_keys=KEY)
    sink = KafkaSink(kafka, LedgerSink(url))
    async with at_work(Ledger(kafka, url)):
        events = [event(seq) for seq in range(10)]
        await sink.write(events[:5])
        while await _arrived(sink, events[:5]) < 5:
            await asyncio.sleep(0.1)
        stop()
        await sink.write(events[5:])
        with pytest.raises(ResourceError):
            await sink.confirmed([str(uuid4())])
        start()
        while await _arrived(sink, events) < 10:
            await asyncio.sleep(0.1)
    await sink.close()


async def _arrived(sink, events) -> int:
    try:
        return len(await sink.confirmed([one.id for one in events]))
    except ResourceError:
        return -1


async def test_brokers_that_are_away():
    sink = KafkaSink(
        KafkaSettings(servers="127.0.0.1:9", user="me", password="secret", signing_keys=KEY),
        LedgerSink("sqlite:///none.db"),
    )
    with pytest.raises(ResourceError) as refused:
        await sink.write([event(0)])
    assert refused.value.message.startswith("Kafka at 127.0.0.1:9 does not take or give events of llmops.usage (")
    assert "secret" not in repr(sink._settings)


# -- what the tables take --------------------------------------------------------------------------------------------


async def test_an_event_without_a_price_gets_that_of_its_time(store, url, by):
    at = by.at
    async with store.write() as connection:
        await set_price(connection, Price("tiny", at, 1_000_000, 500_000, 2_000_000), by)
    sink = LedgerSink(url)
    early = event(0, at=at.replace(year=2025), cost_micros=0, price_id=None)
    late = event(1, at=at.replace(year=2027), cost_micros=0, price_id=None, cached_tokens=30)
    priced = event(2, at=at.replace(year=2027))
    await sink.write([early, late, priced, event(3, model="other", price_id=None, cost_micros=0)])
    await sink.close()
    async with store.read() as connection:
        wanted = select(usage_records.c.seq, usage_records.c.cost_micros, usage_records.c.price_id)
        rows = {row.seq: row for row in await connection.execute(wanted)}
    # 7 tokens at 1, 30 at 0.5, 7 at 2 micro-dollars
    assert (rows[1].cost_micros, rows[1].price_id) == (7 + 15 + 14, f"tiny@{at:%Y-%m-%dT%H:%M:%S}Z")
    assert [(rows[seq].cost_micros, rows[seq].price_id) for seq in (0, 2, 3)] == [(0, None), (3, "p"), (0, None)]


async def test_whatever_an_event_says_the_tables_take_it(store, url):
    """One that they refused would stop all that is behind it."""
    sink = LedgerSink(url)
    odd = "x\0é🙂" * 200
    await sink.write(
        [
            event(0, request_id=odd, model=odd, key_id=odd, finish_reason=odd, priority=odd, version=odd, replica=odd),
            event(1, input_tokens=2**40, latency_ms=2**40, user_id="auth0|someone", price_id=odd),
            event(2, tenant_id="", user_id="a digest"),
            event(3, user_id="auth0|someone", tenant_id="tenant-1"),
        ]
    )
    await sink.close()
    async with store.read() as connection:
        rows = (await connection.execute(select(usage_records).order_by(usage_records.c.seq))).mappings().all()
    assert len(rows[0]["model"].encode()) in range(252, 256)
    assert "\0" not in rows[0]["model"]
    assert rows[1]["user_id"] == rows[3]["user_id"] != rows[0]["user_id"]
    assert rows[2]["user_id"] == ANONYMOUS_USER_ID
    assert rows[1]["input_tokens"] == 2**31 - 1


# -- settings --------------------------------------------------------------------------------------------------------


def test_kafka_without_a_store_is_told():
    with pytest.raises(InputError, match="`kafka` needs `store`"):
        create_usage_check(GatewaySettings(kafka=KafkaSettings(servers="127.0.0.1:9092")))
    with pytest.raises(InputError, match=r"kafka.servers.*such as 127.0.0.1:9092"):
        load_settings(None, kafka={"servers": "http://broker"})


def test_the_leader_keeps_the_ledger_where_there_is_kafka():
    settings = GatewaySettings(store="sqlite:///x.db")
    assert "The ledger" not in [duty.name for duty in make_leader_jobs(settings, CheckedReplicas())]
    settings = GatewaySettings(store="sqlite:///x.db", kafka=KafkaSettings(servers="127.0.0.1:9092", signing_keys=KEY))
    assert "The ledger" in [duty.name for duty in make_leader_jobs(settings, CheckedReplicas())]


async def test_while_kafka_is_away_the_outbox_grows_and_not_the_memory(store, url, tmp_path):
    """LiteLLM #38193 lost such events up to 1.97, and kept them in memory from 1.98 on.

    The figure is in the benchmark `usage`.
    """
    (tmp_path / "gw-1").mkdir()
    outbox, broker = UsageOutbox(tmp_path / "gw-1"), Broker()
    try:
        kafka = KafkaSettings(servers=broker.servers, topic="t", signing_keys=KEY)
        sink = KafkaSink(kafka, LedgerSink(url))
        delivery = UsageDelivery(outbox, sink)
        delivering = asyncio.create_task(delivery.run())
        for first in range(0, 3000, 500):
            outbox.add([encode_event(event(seq)) for seq in range(first, first + 500)])
            await asyncio.sleep(0)
        while not delivery.trouble:
            await asyncio.sleep(0.05)
        # None of them is sent, and delivery holds none: the outbox has all of them.
        assert delivery.behind == outbox.count == 3000
        assert delivery._unconfirmed == 0
        broker.start()
        async with at_work(Ledger(kafka, url)):
            await asyncio.wait_for(delivery.drain(), 300)
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
        await sink.close()
        # and what has arrived needs no room
        assert outbox.count == 0
        assert outbox.size < 50_000
    finally:
        broker.close()
    assert (await total(store)).requests == 3000
