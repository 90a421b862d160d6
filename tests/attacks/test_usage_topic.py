"""Attacks by whoever can write to the usage topic: forged, odd, huge and compressed records, and records that kill.

Every record is kept as usage or parked with a reason, sums stay exact, and honest events of gateways always arrive.
"""

import asyncio
import json
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaClient, AIOKafkaProducer, TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import Engine, select, text
from sqlalchemy.event import listen, remove

from llmops.control import leader_jobs
from llmops.control import ledger as ledger_module
from llmops.control.ledger import Ledger, write_until_accepted
from llmops.errors import InputError
from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.settings import GatewaySettings, KafkaSettings
from llmops.gateway.usage.delivery import UsageDelivery
from llmops.gateway.usage.event_formats import encode_event, to_cloud_event
from llmops.gateway.usage.kafka import KafkaSink, client_options
from llmops.gateway.usage.ledger_sink import LedgerSink
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.signing import SIGNATURE_HEADER, signature, signing_keys
from llmops.gateway.usage.usage_check import create_usage_check
from llmops.store import dead_letters as letters
from llmops.store.database import Store
from llmops.store.dead_letters import DeadLetter, add_dead_letters, count_dead_letters, list_dead_letters
from llmops.store.factory import open_store
from llmops.store.tables import dead_letters, usage_records
from llmops.store.usage_queries import UsageFilter, find_sequence_gaps, high_water_mark, sum_usage
from llmops.store.usage_writes import MAX_SUM
from tests.attacks.harness import MIB, scaled
from tests.store.test_ledger import KEY, NOON, at_work, broker, kafka, quick_groups
from tests.store.test_ledger import event as ledger_event
from tests.support.accounts import add_key
from tests.support.waiting import stop_tasks

__all__ = ["broker", "kafka", "quick_groups"]

OTHER = "fedcba9876543210" * 2
#: Megabytes that one compressed record unpacks to, and by which it may raise the memory of the ledger's process.
BOMB_MIB, BOMB_BOUND_MIB = scaled(64, 700), 48


def event(seq: int, **changes: object) -> UsageEvent:
    """An event of one tenant, whose records are in one partition."""
    return ledger_event(seq, **{"tenant_id": "acme", **changes})


@asynccontextmanager
async def stranger(kafka: KafkaSettings, **options: object) -> AsyncIterator[AIOKafkaProducer]:
    """A producer that can write to the topic and has no signing key."""
    producer = AIOKafkaProducer(**client_options(kafka), **options)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def arrived(sink: LedgerSink | KafkaSink, events: list[UsageEvent]) -> None:
    wanted = {one.id for one in events}
    while await sink.confirmed(list(wanted)) != wanted:
        await asyncio.sleep(0.05)


async def counts(store: Store) -> dict[str, int]:
    async with store.read() as reading:
        return await count_dead_letters(reading)


async def bill(store: Store) -> tuple[int, int]:
    """Return the requests and the micro-dollars of all tenants."""
    async with store.read() as reading:
        (one,) = await sum_usage(reading, UsageFilter())
    return one.requests, one.cost_micros


async def test_an_answer_of_the_broker_that_cannot_be_read_does_not_stop_the_ledger(kafka, store, url, monkeypatch):
    """Before the fix, nothing was billed any more, without a line in the log."""
    fetch, failed = Fetcher._proc_fetch_request, asyncio.Event()

    async def damaged_once(self: Fetcher, *request: object) -> bool:
        if not failed.is_set():
            failed.set()
            raise KeyError("an unknown partition")
        return bool(await fetch(self, *request))

    monkeypatch.setattr(Fetcher, "_proc_fetch_request", damaged_once)
    monkeypatch.setattr(leader_jobs, "MIN_BACKOFF", 0.05)
    sink = KafkaSink(kafka, LedgerSink(url))
    async with at_work(Ledger(kafka, url)):
        await failed.wait()
        await sink.write([one := event(0)])
        await asyncio.wait_for(arrived(sink, [one]), 30)
    await sink.close()


# -- forged records ----------------------------------------------------------------------------------------------------


async def test_a_stranger_who_takes_the_next_numbers_of_a_gateway_costs_it_no_event(kafka, store, url, tmp_path):
    """Before the fix, 40 of the next 50 honest requests were never billed, without a log line."""
    (tmp_path / "gw-1").mkdir()
    outbox, sink = UsageOutbox(tmp_path / "gw-1"), KafkaSink(kafka, LedgerSink(url))
    honest = [event(seq) for seq in range(scaled(60, 1000))]
    delivery = UsageDelivery(outbox, sink, resend_timeout=1.0)
    outbox.add([encode_event(one) for one in honest[:10]])
    delivering = asyncio.create_task(delivery.run())
    async with at_work(Ledger(kafka, url)), stranger(kafka) as producer:
        await arrived(sink, honest[:10])
        forged = [event(seq, cost_micros=10**9) for seq in range(10, 50)]
        for one in forged:
            await producer.send(kafka.topic, to_cloud_event(one))
            wrong = signature(OTHER.encode(), to_cloud_event(one))
            await producer.send(kafka.topic, to_cloud_event(one), headers=[(SIGNATURE_HEADER, wrong)])
        await producer.flush()
        outbox.add([encode_event(one) for one in honest[10:]])
        await arrived(sink, honest)
        await delivery.drain()
    await stop_tasks(delivering)
    assert (delivery.behind, await bill(store)) == (0, (len(honest), 3 * len(honest)))
    assert await counts(store) == {"not signed by a gateway": 2 * len(forged)}
    await sink.close()
    outbox.close()


async def test_numbers_that_another_event_has_in_the_ledger_do_not_let_an_event_be_forgotten(store, url, tmp_path):
    """A restored snapshot uses its numbers a second time, with every signature in order."""
    (tmp_path / "gw-1").mkdir()
    outbox, sink = UsageOutbox(tmp_path / "gw-1"), LedgerSink(url)
    await sink.write([event(seq) for seq in range(40)])
    again = [event(seq) for seq in range(40)]
    outbox.add([encode_event(one) for one in again])
    delivery = UsageDelivery(outbox, sink)
    delivering = asyncio.create_task(delivery.run())
    await delivery.drain()
    await stop_tasks(delivering)
    assert await sink.confirmed([one.id for one in again]) == {one.id for one in again}
    assert (await bill(store))[0] == 80
    await sink.close()
    outbox.close()


async def test_two_keys_are_valid_while_one_replaces_the_other(kafka, store, url):
    rotated = kafka.model_copy(update={"signing_keys": f"{OTHER},{KEY}"})
    behind, ahead = KafkaSink(kafka, LedgerSink(url)), KafkaSink(rotated, LedgerSink(url))
    events = [event(0), event(1)]
    await behind.write(events[:1])
    await ahead.write(events[1:])
    async with at_work(Ledger(rotated, url)):
        await arrived(behind, events)
    assert await counts(store) == {}
    await behind.close()
    await ahead.close()


def test_a_gateway_without_a_key_is_refused_where_kafka_is_configured(tmp_path):
    settings = GatewaySettings(store="sqlite:///x.db", kafka=KafkaSettings(servers="127.0.0.1:9092"))
    with pytest.raises(InputError, match=r"the setting kafka.signing_keys has no usable keys \(0 found\)"):
        create_usage_check(settings)
    file = tmp_path / "keys"
    for written, told in (
        ("short", "1 found"),
        (f"{KEY}\n{OTHER}\n{KEY}1", "3 found"),
        ("", "0 found"),
        (f"{KEY}\n" + "\0" * 40, "2 found"),
    ):
        file.write_text(written)
        with pytest.raises(InputError, match=told) as refused:
            signing_keys(KafkaSettings(servers="127.0.0.1:9092", signing_keys_file=file))
        assert KEY not in refused.value.message
    file.write_text(f"{KEY}\n{OTHER}\n")
    assert len(signing_keys(KafkaSettings(servers="127.0.0.1:9092", signing_keys_file=file))) == 2
    with pytest.raises(InputError, match="cannot be read"):
        signing_keys(KafkaSettings(servers="127.0.0.1:9092", signing_keys_file=tmp_path / "none"))
    assert KEY not in repr(KafkaSettings(servers="127.0.0.1:9092", signing_keys=KEY))


# -- odd records -------------------------------------------------------------------------------------------------------

_ODD = (None, [], {}, "x", "", 1.5, True, -1, 2**31, 2**53, 2**63, 2**70, "\0", "\ud800", "\x1b]0;x\x07", 1e308)
_scalars = st.one_of(*map(st.just, _ODD), st.integers(), st.floats(), st.text(max_size=20), st.datetimes().map(str))
_values = st.recursive(_scalars, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one))
_BASE = json.loads(to_cloud_event(event(0)))
_changes = st.dictionaries(st.sampled_from([*_BASE, *(f"data.{name}" for name in _BASE["data"])]), _values, max_size=3)


def changed(changes: dict[str, object]) -> bytes:
    """Return an event as JSON with these fields replaced, and an id of its own."""
    made = {**_BASE, "id": str(uuid4()), "data": dict(_BASE["data"])}
    for name, value in changes.items():
        place, _, field = name.rpartition(".")
        if place and isinstance(made["data"], dict):
            made["data"][field] = value
        elif not place:
            made[name] = value
    return json.dumps(made).encode()


class Record:
    """A record as the consumer gives it, signed by a gateway."""

    topic, partition, offset = "t", 0, 0

    def __init__(self, value: bytes) -> None:
        self.value, self.headers = value, ((SIGNATURE_HEADER, signature(KEY.encode(), value)),)


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Ledger(KafkaSettings(servers="127.0.0.1:9", signing_keys=KEY), "sqlite:///none.db")


async def test_every_signed_json_is_on_a_bill_or_parked_and_sums_are_exact(ledger, store):
    """Before the fix, some of 306 shapes were tried again for ever.

    There were 56 on PostgreSQL and 64 on SQLite.
    """
    made: list[bytes] = []

    @settings(max_examples=scaled(60, 5000), database=None)
    @given(st.one_of(_changes.map(changed), _values.map(lambda one: json.dumps(one).encode()), st.binary(max_size=50)))
    def collect(value: bytes) -> None:
        made.append(value)

    collect()
    made += [changed({name: odd}) for name in ("data.cost_micros", "data.seq", "time", "id") for odd in _ODD]
    made += [changed({"data.cost_micros": cost}) for cost in range(20)]
    made += [b"[" * 60_000, b'{"a":' * 10_000, b"", b"\xff", to_cloud_event(event(0))]
    for at in range(0, len(made), 50):
        events, refused = ledger._validate_records([Record(value) for value in made[at : at + 50]])
        assert len(events) + len(refused) == len(made[at : at + 50])
        await ledger_module._add_dead_letters(store, refused)
        await asyncio.wait_for(write_until_accepted(store, events), 60)
    async with store.read() as reading:
        rows = (await reading.execute(select(usage_records.c.cost_micros))).scalars().all()
    requests, billed = len(rows), sum(rows)
    assert await bill(store) == (requests, billed)
    assert requests > 10
    assert sum((await counts(store)).values()) > 10


async def test_costs_near_the_end_of_the_numbers_drop_no_other_event(store):
    """Before the fix, SQLite's sum of such costs became a float.

    PostgreSQL rejected the batch.
    """
    huge = [event(seq, cost_micros=2**63 - 10) for seq in range(3)]
    await asyncio.wait_for(write_until_accepted(store, [*huge, *(event(seq) for seq in range(3, 10))]), 30)
    assert (await bill(store), await counts(store)) == ((7, 21), {"cost out of range": 3})
    async with store.write() as writing:
        for table in ("usage_totals", "tenant_totals"):
            await writing.execute(text(f"UPDATE {table} SET cost_micros = {MAX_SUM - 5}"))
    await write_until_accepted(store, [event(10, cost_micros=10**12), event(11)])
    assert await bill(store) == (9, MAX_SUM)


async def test_no_text_of_an_event_holds_up_a_gateway_without_kafka(store, url):
    """Before the fix, PostgreSQL refused to look up the price of a model with U+0000, again and again."""
    sink, texts = LedgerSink(url), ("model", "request_id", "tenant_id", "user_id", "key_id", "version", "priority")
    events = [event(at, price_id=None, **{name: "a\0\x1b" + 500 * "x"}) for at, name in enumerate(texts)]
    await sink.write(events)
    assert await sink.confirmed([one.id for one in events]) == {one.id for one in events}
    await sink.close()


async def test_one_event_that_the_tables_refuse_is_parked_alone(store, monkeypatch):
    """Whatever else goes wrong with one event, the others of its batch are on the bill."""
    written = ledger_module.write_events

    def fails(connection, events):
        if any(one.model == "poison" for one in events):
            raise AttributeError("poison")
        return written(connection, events)

    monkeypatch.setattr(ledger_module, "write_events", fails)
    events = [event(seq, model="poison" if seq == 13 else "tiny") for seq in range(30)]
    await asyncio.wait_for(write_until_accepted(store, events), 30)
    assert (await bill(store), await counts(store)) == ((29, 87), {"refused by the tables": 1})


# -- whose bill it is --------------------------------------------------------------------------------------------------


async def test_tenant_user_and_key_must_belong_together(store, url):
    (_, mine, user), (_, theirs, _) = [await add_key(store, tenant) for tenant in ("acme", "other")]
    honest, unknown = event(0, user_id=user, key_id=mine), event(1, user_id=str(uuid4()), key_id="")
    wrong = [event(2, tenant_id="other", user_id=user, key_id=mine), event(3, user_id=user, key_id=theirs)]
    wrong.append(event(4, user_id=str(uuid4()), key_id=mine))
    sink = LedgerSink(url)
    await sink.write([honest, unknown, *wrong])
    assert await counts(store) == {"user of another tenant": 1, "key of another user": 2}
    async with store.read() as reading:
        lines = await sum_usage(reading, UsageFilter(), ("tenant",))
    # a user whom the store does not know is billed to the tenant that the gateway names
    assert [(one.group["tenant"], one.requests) for one in lines] == [("acme", 2)]
    # what is parked has arrived: its gateway does not send it again
    assert len(await sink.confirmed([one.id for one in (honest, unknown, *wrong)])) == 5
    await sink.close()


async def test_a_number_far_ahead_reports_no_quadrillions_of_missing_events(store):
    """Before the fix, the number 2**53 - 1 reported 9,007,199,254,740,984 missing events."""
    await write_until_accepted(store, [event(seq) for seq in range(5)])
    await write_until_accepted(store, [event(2**53 - 2), event(7)])
    # two jumps in one batch
    await write_until_accepted(store, [event(seq, gateway_id="gw-2") for seq in (1, 2**40, 2**53 - 2)])
    async with store.read() as reading:
        missing = sum(gap.last - gap.first + 1 for gap in await find_sequence_gaps(reading))
        mark = await high_water_mark(reading, "gw-1")
    assert (missing <= 1_000_000, mark, (await bill(store))[0]) == (True, 2**53 - 1, 10)


# -- large records -----------------------------------------------------------------------------------------------------

_WATCHED = """
import asyncio, sys, threading, time
from llmops.control import ledger
from llmops.control.leader_jobs import run_jobs
from llmops.gateway.settings import KafkaSettings
ledger.SESSION_TIMEOUT_MS = 1000
servers, topic, url, key = sys.argv[1:]

async def held():
    longest, last = 0.0, time.monotonic()
    while True:
        await asyncio.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        print(f"held {longest:.3f}", flush=True)

async def main():
    kafka = KafkaSettings(servers=servers, topic=topic, signing_keys=key)
    await asyncio.gather(run_jobs([ledger.Ledger(kafka, url)]), held())

asyncio.run(main())
"""
_BOMB = """
import asyncio, sys
from aiokafka import AIOKafkaProducer

async def main():
    servers, topic, size = sys.argv[1:]
    most = {"max_request_size": 2**31 - 1, "max_batch_size": 2**31 - 1}
    producer = AIOKafkaProducer(bootstrap_servers=servers, compression_type="gzip", **most)
    await producer.start()
    await producer.send_and_wait(topic, b"0" * int(size))
    await producer.stop()

asyncio.run(main())
"""


async def _run(program: str, *arguments: object) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, *map(str, arguments), stdout=pipe)


async def test_a_compressed_record_is_never_unpacked(kafka, folder):
    """Before the fix, a record that unpacks to 700 MiB took 1,420 MiB of memory.

    It held the event loop for 3.7 s.
    """
    url = f"sqlite:///{folder}/ledger.db"
    sink = KafkaSink(kafka, LedgerSink(url))
    events = [event(seq) for seq in range(20)]
    await sink.write(events[:10])
    watched = await _run(_WATCHED, kafka.servers, kafka.topic, url, KEY)
    try:
        await arrived(sink, events[:10])
        before = _peak(watched.pid)
        await (await _run(_BOMB, kafka.servers, kafka.topic, BOMB_MIB * MIB)).wait()
        await sink.write(events[10:])
        await arrived(sink, events)
        assert (_peak(watched.pid) - before) / MIB < BOMB_BOUND_MIB
    finally:
        watched.terminate()
        said, _ = await watched.communicate()
        await sink.close()
    assert float(said.split()[-1]) < 2.0
    async with await open_store(url) as store:
        assert await counts(store) == {"compressed batch": 1}


def _peak(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("deltas", [[2**63 - 1], [-3], [1, 0]])
async def test_offsets_that_a_writer_gives_records_do_not_stop_the_ledger(kafka, store, url, deltas, caplog):
    """Before the fix, each such record ended the ledger, with twice the pause of the one before, up to a minute."""
    sink, honest = KafkaSink(kafka, LedgerSink(url)), [event(seq) for seq in range(4)]
    await sink.write(honest[:2])
    async with at_work(Ledger(kafka, url)):
        await arrived(sink, honest[:2])
        # the record after two of the gateway
        await _produce(kafka, [delta - 2 * (delta == 2**63 - 1) for delta in deltas])
        await sink.write(honest[2:])
        await arrived(sink, honest)
    assert "failed" not in caplog.text
    assert await counts(store) == {"damaged batch": 1}
    await sink.close()


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize(
    ("honest", "bad"),
    [
        # a batch that says it has no records, and one without any
        (2, [{"deltas": [0, 1, 2], "records": 0}]),
        (2, [{"deltas": [], "last": 0}]),
        # nothing before it can be read
        (0, [{"deltas": [0, 1, 2], "records": 0}]),
        (0, [{"deltas": [0], "records": 0, "last": scaled(40, 1000)}]),
        # many offsets, and several one after another
        (2, [{"deltas": [0], "records": 0, "last": scaled(1000, 2**31 - 2)}, {"deltas": [0], "records": 0}]),
        (2, [{"deltas": [0, 1], "last": 70_000}]),
    ],
)
async def test_batches_from_whose_offset_a_broker_returns_nothing_are_passed_over(
    kafka, store, url, monkeypatch, honest, bad
):
    """Before the fix, the ledger waited there for ever without a line in the log, and again after a restart.

    A batch of 70,000 offsets was read and parked thousands of times a second.
    """
    monkeypatch.setattr(ledger_module, "STALL_SECONDS", 0.2, raising=False)
    sink, events = KafkaSink(kafka, LedgerSink(url)), [event(seq) for seq in range(6)]
    await sink.write(events[:honest])
    async with at_work(Ledger(kafka, url)):
        await arrived(sink, events[:honest])
        for number, batch in enumerate(bad):
            await _produce(kafka, **batch)
            if honest:
                # the ledger is past the batch before another follows
                while sum((await counts(store)).values()) <= number:
                    await asyncio.sleep(0.05)
        for one in events[honest:]:
            await sink.write([one])
        await asyncio.wait_for(arrived(sink, events), 60)
    assert await counts(store) == {"damaged batch": len(bad)}
    assert (await bill(store))[0] == len(events)
    await sink.close()


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_each_batch_that_is_passed_over_is_counted(kafka, store, url, monkeypatch):
    """Before the fix, 300 such batches one after another were one dead letter."""
    monkeypatch.setattr(ledger_module, "STALL_SECONDS", 0.2)
    sink, events = KafkaSink(kafka, LedgerSink(url)), [event(seq) for seq in range(3)]
    await sink.write(events[:2])
    async with at_work(Ledger(kafka, url)):
        await arrived(sink, events[:2])
        for _ in range(10):
            await _produce(kafka, [0, 1, 2], records=0)
        await sink.write(events)
        await asyncio.wait_for(arrived(sink, events), 60)
        while sum((await counts(store)).values()) < 10:
            await asyncio.sleep(0.05)
    assert await counts(store) == {"damaged batch": 10}
    await sink.close()


async def _produce(
    kafka: KafkaSettings, deltas: list[int], records: int | None = None, last: int | None = None
) -> None:
    """Write a batch whose records have these offsets, from its own.

    The batch says that it has this number of records, and this last offset.
    """
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, MIB)
    for delta in deltas:
        builder.append(delta, NOON.second, None, b"x", [])
    builder.set_producer_state(-1, -1, -1)
    batch = bytearray(builder.build())
    # the last offset is what brokers check
    batch[23:27] = (len(deltas) - 1 if last is None else last).to_bytes(4, "big")
    batch[57:61] = (len(deltas) if records is None else records).to_bytes(4, "big")
    batch[17:21] = calc_crc32c(bytes(batch[21:])).to_bytes(4, "big")
    client = AIOKafkaClient(bootstrap_servers=kafka.servers)
    await client.bootstrap()
    await client.set_topics([kafka.topic])
    node = client.cluster.leader_for_partition(TopicPartition(kafka.topic, 0))
    given = {"transactional_id": None, "required_acks": -1, "timeout": 10_000}
    await client.send(node, ProduceRequest(**given, topics=[(kafka.topic, [(0, bytes(batch))])]))
    await client.close()


async def test_a_record_is_bounded_before_it_is_parsed(kafka, store, url):
    value = b"[" * (900 * 1024)
    assert len(zlib.compress(value)) < 2000
    sink = KafkaSink(kafka, LedgerSink(url))
    async with stranger(kafka) as producer:
        await producer.send_and_wait(kafka.topic, value)
        await producer.send_and_wait(kafka.topic, value, headers=[(SIGNATURE_HEADER, signature(KEY.encode(), value))])
    honest = [event(0)]
    await sink.write(honest)
    async with at_work(Ledger(kafka, url)):
        await arrived(sink, honest)
    assert await counts(store) == {"too large": 2}
    async with store.read() as reading:
        (length,) = {len(one) for one in (await reading.execute(select(dead_letters.c.value))).scalars()}
    assert length == letters.MAX_UNSIGNED_BYTES
    await sink.close()


async def test_many_small_records_are_parked_in_few_transactions(kafka, store, url, monkeypatch):
    """Before the fix, 600,000 records of one byte held events up for 53 s, a transaction for each thousand of them."""
    park, parked = ledger_module._add_dead_letters, []

    async def counted(store: Store, letters: list[DeadLetter]) -> None:
        parked.append(len(letters))
        await park(store, letters)

    monkeypatch.setattr(ledger_module, "_add_dead_letters", counted)
    monkeypatch.setattr(ledger_module, "BATCH_SIZE", 10)
    monkeypatch.setattr(ledger_module, "FLOOD_BATCH_SIZE", 1000, raising=False)
    async with stranger(kafka) as producer:
        await asyncio.gather(*[await producer.send(kafka.topic, b"%d" % (one % 10), partition=0) for one in range(500)])
    async with at_work(Ledger(kafka, url)):
        while sum((await counts(store)).values()) < 500:
            await asyncio.sleep(0.05)
    assert sum(parked) == 500
    assert len([one for one in parked if one]) < 20


async def test_parked_values_of_strangers_hide_no_event_of_a_gateway(store):
    """Before the fix, 100 values of a stranger pushed the events that are on no bill off the list."""
    signed = [DeadLetter("damaged price", "t", b"e%d" % one, str(uuid4())) for one in range(3)]
    strange = [DeadLetter("not signed", "t", b"%d" % one) for one in range(5)]
    await store.transact(lambda connection: add_dead_letters(connection, signed, NOON))
    await store.transact(lambda connection: add_dead_letters(connection, strange, NOON + timedelta(days=1)))
    seen, after = [], None
    async with store.read() as reading:
        while page := await list_dead_letters(reading, 2, after):
            seen += [one.letter.event_id is not None for one in page]
            after = page[-1]
    assert seen == [True] * 3 + [False] * 5


async def test_a_batch_that_is_read_again_counts_its_dead_letters_once(store):
    """A restart between the dead letters and the commit of the offsets counted all of them a second time."""
    batches = [[DeadLetter("not signed", f"t[0] at {at}", b"v") for at in (first, first + 1)] for first in (0, 2)]
    for batch in (batches[0], batches[0], batches[1], batches[1]):
        await store.transact(lambda connection, batch=batch: add_dead_letters(connection, batch, NOON))
    async with store.read() as reading:
        assert await count_dead_letters(reading) == {"not signed": 4}


async def test_parked_records_cost_a_few_statements_however_many_they_are(store, monkeypatch):
    """Before the fix, each record was a statement: a stranger's 700 a second kept the ledger from honest events."""
    monkeypatch.setattr("llmops.store.dead_letters.MAX_ROWS", 1500)
    statements: list[str] = []
    listen(Engine, "before_cursor_execute", note := lambda *given: statements.append(given[2]))
    for turn, begin in enumerate((0, 1000, 1000)):
        values = ((f"t[{turn}] at {one}", b"%d" % one) for one in range(begin, begin + 1000))
        some = [DeadLetter("not signed by a gateway", source, value) for source, value in values]
        await store.transact(lambda connection, some=some: add_dead_letters(connection, some, NOON))
    remove(Engine, "before_cursor_execute", note)
    assert len([one for one in statements if "dead_letters" in one]) <= 8
    async with store.read() as reading:
        assert len((await reading.execute(select(dead_letters.c.id))).all()) == 1501
    assert await counts(store) == {"not signed by a gateway": 3000}


# -- records that end the process --------------------------------------------------------------------------------------

_DIES = _WATCHED.replace(
    "async def main", "examine = ledger.Ledger._validate_record\n"
    "def dies(self, record):\n"
    "    if record.value == b'kills': import os; os._exit(9)\n"
    "    return examine(self, record)\n"
    "ledger.Ledger._validate_record = dies\n\nasync def main",
)  # fmt: skip


async def test_an_offset_that_ended_the_process_twice_is_stepped_over(kafka, folder):
    """Before the fix, the process ended at every start."""
    url = f"sqlite:///{folder}/ledger.db"
    sink = KafkaSink(kafka, LedgerSink(url))
    events = [event(seq) for seq in range(20)]
    await (await open_store(url)).close()
    await sink.write(events[:7])
    async with stranger(kafka) as producer:
        await producer.send_and_wait(kafka.topic, b"kills", key=b"acme")
    await sink.write(events[7:])
    starts = 0
    while starts < 6 and len(await sink.confirmed([one.id for one in events])) < 20:
        starts += 1
        process = await _run(_DIES, kafka.servers, kafka.topic, url, KEY)
        ended = asyncio.create_task(process.communicate())
        all_there = asyncio.create_task(arrived(sink, events))
        await asyncio.wait((ended, all_there), return_when=asyncio.FIRST_COMPLETED)
        all_there.cancel()
        if process.returncode is None:
            process.terminate()
        await ended
    # the first time in a batch, twice alone, and then it is passed
    assert starts == 4
    async with await open_store(url) as store:
        assert (await bill(store), await counts(store)) == ((20, 60), {"ended the process": 1})
    await sink.close()


@pytest.mark.parametrize("password", ["hunter2", "hunter2,more"])
def test_a_password_in_the_address_of_a_broker_is_refused_and_not_printed(password: str) -> None:
    """Before the fix, `llmops chart` wrote it to the values, and a message had the part before a comma."""
    with pytest.raises(ValidationError, match="HOST:PORT") as refused:
        KafkaSettings(servers=f"llmops:{password}@broker:9092")
    assert "hunter2" not in refused.value.errors()[0]["msg"]
