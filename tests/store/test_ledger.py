"""Usage by way of a broker, into either database: each event once, whatever is killed in between."""

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from click.testing import CliRunner
from sqlalchemy import func, select

from llmops.cli.main import cli
from llmops.clocks import utc_now
from llmops.control import ledger as ledger_module
from llmops.control.admin.reconcile import ACTION, reconcile
from llmops.control.admin.schemas import EngineTokens, MissingEvents, ReconciliationRequest
from llmops.control.leader_jobs import run_jobs
from llmops.control.ledger import Ledger
from llmops.control.reconcile import Reconciler, served_tokens
from llmops.errors import InputError, ResourceError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome, Usage, UsageEvent
from llmops.gateway.logging_setup import RepeatedLines
from llmops.gateway.settings import GatewaySettings, KafkaSettings, UsageSettings, load_settings
from llmops.gateway.usage.delivery import UsageDelivery
from llmops.gateway.usage.event_formats import encode_event
from llmops.gateway.usage.kafka import KafkaSink, client_options
from llmops.gateway.usage.ledger_sink import ANONYMOUS_USER_ID, LedgerSink
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.sink import NoPrices
from llmops.gateway.usage.usage_check import UsageCheck, create_usage_check
from llmops.store.audit import list_audit_entries
from llmops.store.dead_letters import count_dead_letters
from llmops.store.factory import open_store
from llmops.store.prices import Price, set_price
from llmops.store.tables import tenant_totals, usage_records
from llmops.store.usage_queries import UsageFilter, UsageSum, high_water_mark, sum_usage
from tests.support.pages import Page, PageServer
from tests.support.servers import Broker
from tests.support.waiting import eventually, stop_tasks

KEY = "0123456789abcdef" * 2
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def event(seq: int, gateway: str = "gw-1", **changes) -> UsageEvent:
    who = f"tenant-{seq % 3}", str(UUID(int=7)), "key-a"
    made = UsageEvent(str(uuid4()), gateway, seq, NOON, f"chatcmpl-{seq}", *who, "tiny", 37)
    return made._replace(output_tokens=7, cost_micros=3, price_id="p")._replace(**changes)


@pytest.fixture(scope="session")
def broker() -> Iterator[str]:
    """Yield the address of a broker that tests share, each with a topic of its own."""
    with Broker() as own:
        yield own.servers


@pytest.fixture
def kafka(broker: str) -> KafkaSettings:
    return KafkaSettings(servers=broker, topic=f"t{uuid4().hex}", signing_keys=KEY)


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
        await stop_tasks(task)


async def mark(store, gateway: str = "gw-1") -> int:
    async with store.read() as connection:
        return await high_water_mark(connection, gateway)


async def until(store, wanted: int, gateway: str = "gw-1") -> None:
    async def is_there() -> bool:
        return await mark(store, gateway) >= wanted

    await eventually(is_there)


async def total(store) -> UsageSum:
    async with store.read() as connection:
        return (await sum_usage(connection, UsageFilter()))[0]


async def test_events_arrive_once_whatever_else_is_in_the_topic(kafka, store, url):
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
    counts = (summed.requests, summed.input_tokens, summed.output_tokens, summed.cost_micros)
    assert counts == (41, 41 * 37, 41 * 7, 123)
    async with store.read() as reading:
        assert await count_dead_letters(reading) == {"not signed by a gateway": 4}


@pytest.mark.parametrize("kind", ["sqlite"])
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
        await eventually(lambda: delivery._cursor >= 1000)
        assert delivery.lag(NOON.replace(minute=5)) == 300
        own.kill()
        own.start()
        async with at_work(Ledger(kafka, url)):
            await until(store, 1200)
            await asyncio.wait_for(delivery.drain(), 300)
            assert delivery.lag(NOON.replace(year=2027)) == 0
        await stop_tasks(delivering)
        await sink.close()
    assert (await total(store)).requests == 1200


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_broker_whose_log_is_shorter_than_what_was_read_of_it(kafka, store, url):
    """One that forgot its events, and was told by a ledger that it had read many."""
    sink = KafkaSink(kafka, LedgerSink(url))
    await sink.write([event(seq) for seq in range(10)])
    options = {"group_id": ledger_module.CONSUMER_GROUP, "enable_auto_commit": False, **client_options(kafka)}
    before = AIOKafkaConsumer(kafka.topic, **options)
    await before.start()
    await before.commit(dict.fromkeys(before.assignment(), 1000))
    await before.stop()
    async with at_work(Ledger(kafka, url)):
        await until(store, 10)
    await sink.close()


async def test_the_ledger_waits_for_its_postgresql(kafka, own_postgres):
    url, stop, start = own_postgres
    sink = KafkaSink(kafka, LedgerSink(url))
    async with at_work(Ledger(kafka, url)):
        events = [event(seq) for seq in range(10)]
        await sink.write(events[:5])
        await _arrived(sink, events[:5])
        stop()
        await sink.write(events[5:])
        with pytest.raises(ResourceError):
            await sink.confirmed([str(uuid4())])
        start()
        await _arrived(sink, events)
    await sink.close()


async def _arrived(sink, events) -> None:
    """Wait until the store, which may still be away, has all events."""

    async def confirmed() -> bool:
        with contextlib.suppress(ResourceError):
            return len(await sink.confirmed([one.id for one in events])) == len(events)
        return False

    await eventually(confirmed)


# -- what the tables take --------------------------------------------------------------------------------------------


async def test_an_event_without_a_price_gets_that_of_its_start(store, url, by):
    at = by.at
    async with store.write() as connection:
        await set_price(connection, Price("tiny", at, 1_000_000, 500_000, 2_000_000), by)
    sink = LedgerSink(url)
    early = event(0, at=at + timedelta(seconds=9), cost_micros=0, price_id=None, latency_ms=10_000)
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


async def test_usage_of_a_gateway_whose_clock_is_ahead_is_of_now(store, url, caplog, monkeypatch):
    """Before the fix, it was on the bill of a month to come, and counted in the budgets of all months until then."""
    monkeypatch.setattr("llmops.gateway.usage.ledger_sink._LINES", RepeatedLines(60.0))
    sink, now = LedgerSink(url), utc_now()
    if not url.startswith("sqlite"):
        monkeypatch.setattr("llmops.store.columns.utc_now", lambda: now + timedelta(days=400))
    ahead = [event(seq, at=now + timedelta(days=400 * seq, seconds=30)) for seq in (0, 1)]
    await sink.write(ahead)
    await sink.close()
    async with store.read() as connection:
        days = set(await connection.scalars(select(tenant_totals.c.day)))
        times = sorted(await connection.scalars(select(usage_records.c.created_at)))
    assert days <= {(now + timedelta(minutes=at)).date() for at in (0, 30)}
    assert max(abs(one - now) for one in times) < timedelta(minutes=30)
    assert ahead[0].at in times
    assert caplog.text.count("its usage is billed as of now") == 1


async def test_gateways_whose_event_numbers_jump_write_one_line_a_second(store, url, caplog):
    """Before the fix, a batch of 1,000 events wrote as many lines."""
    sink = LedgerSink(url)
    await sink.write([event(2**40, gateway_id=f"gw-{number}") for number in range(20)])
    await sink.close()
    assert caplog.text.count("The event numbers of gateway") == 1


async def test_whatever_an_event_says_the_tables_take_it(store, url):
    """One that they refused would stop all that is behind it."""
    sink = LedgerSink(url)
    odd = "x\0é🙂" * 200
    names = ("request_id", "model", "key_id", "finish_reason", "priority", "version", "replica")
    huge = event(1, input_tokens=2**40, latency_ms=2**40, user_id="auth0|someone", price_id=odd)
    unknown, again = event(2, tenant_id="", user_id="a digest"), event(3, user_id="auth0|someone", tenant_id="tenant-1")
    await sink.write([event(0, **dict.fromkeys(names, odd)), huge, unknown, again])
    await sink.close()
    async with store.read() as connection:
        rows = (await connection.execute(select(usage_records).order_by(usage_records.c.seq))).mappings().all()
    assert len(rows[0]["model"].encode()) in range(252, 256)
    assert "\0" not in rows[0]["model"]
    assert rows[1]["user_id"] == rows[3]["user_id"] != rows[0]["user_id"]
    assert (rows[2]["user_id"], rows[1]["input_tokens"]) == (ANONYMOUS_USER_ID, 2**31 - 1)


# -- settings --------------------------------------------------------------------------------------------------------


def test_kafka_without_a_store_is_told():
    with pytest.raises(InputError, match="`kafka` needs the setting `store`"):
        create_usage_check(GatewaySettings(kafka=KafkaSettings(servers="127.0.0.1:9092")))
    with pytest.raises(InputError, match=r"kafka.servers.*is not HOST:PORT"):
        load_settings(None, kafka={"servers": "http://broker"})


# -- A gateway's usage while its PostgreSQL is away


GENEROUS = 60.0
CALLER = Caller("acme", str(UUID(int=7)), "key-a", "acme/key-a")


async def test_litellm_38193_no_row_is_dropped_and_no_memory_filled(own_postgres, tmp_path):
    url, stop, start = own_postgres
    check = UsageCheck(tmp_path / "usage", UsageSettings(), LedgerSink(url), NoPrices())
    await check.start()

    async def requests(count: int) -> None:
        for at in range(count):
            context = RequestContext(f"req_{at}", caller=CALLER)
            await check.before({"type": "http", "method": "POST", "headers": []}, context)
            context.usage_recorder.begin("tiny", f"chatcmpl-{at}", 10)
            context.usage_recorder.end(Outcome(200, "stop", Usage(10, 5)))
            check.after(context, Outcome(200))
            # As the gateway's own task does ten times a second.
            if at % 50 == 49:
                check.worker.writer.flush()

    await requests(100)
    await check.settle(GENEROUS)
    assert check.worker.delivery.behind == 0
    stop()
    tracemalloc.start()
    await requests(1000)
    before, _ = tracemalloc.get_traced_memory()
    await requests(3000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # one event is some 600 bytes: they are in the outbox, and only there
    assert grown < 300_000
    start()
    await check.settle(GENEROUS)
    assert check.worker.delivery.behind == 0
    await check.close()
    async with await open_store(url) as store, store.read() as connection:
        seqs = (await connection.execute(select(usage_records.c.seq))).scalars().all()
        total = await connection.scalar(select(func.sum(tenant_totals.c.output_tokens)))
    assert (sorted(seqs), total) == (list(range(4100)), 5 * 4100)


# -- The reconciler: what has not arrived, and what engines say that they served


PAGE = b"""# TYPE nv_llm_output_token_len histogram
nv_llm_output_token_len_bucket{le="10",model="tiny-tensorrt_llm",response_metric_type="total_output_tokens"} 1
nv_llm_output_token_len_sum{model="tiny-tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 90
nv_llm_output_token_len_count{model="tiny-tensorrt_llm",response_metric_type="total_output_tokens"} 9
nv_llm_input_token_len_sum{model="tiny-tensorrt_llm",response_metric_type="total_input_tokens"} 1000
"""


def events(by, *numbers, gateway="gw-1"):
    ids = {seq: f"{gateway[-1] * 8}-0000-7000-8000-{seq:012x}" for seq in numbers}
    return [UsageEvent(ids[seq], gateway, seq, by.at, "r", "", "", "", "tiny", 5, 0, 10) for seq in numbers]


async def report(store, by, **served):
    async with store.write() as connection:
        return await reconcile(connection, by, ReconciliationRequest(served=served))


async def test_gaps_are_told_until_they_are_filled(store, url, by):
    sink = LedgerSink(url)
    await sink.write(events(by, 0, 1, 4, 5, 8))
    await sink.write(events(by, 0, 1, 2, gateway="gw-2"))
    first = await report(store, by)
    assert (first.gateways, first.missing) == (2, 4)
    expected = [MissingEvents(gateway="gw-1", first=a, last=b) for a, b in ((2, 3), (6, 7))]
    assert list(first.gaps) == expected
    later = replace(by, at=by.at + timedelta(hours=1))
    await sink.write(events(by, 2, 3))
    second = await report(store, later)
    assert (second.missing, list(second.gaps)) == (2, expected[1:])
    await sink.write(events(by, 6, 7))
    assert (await report(store, later)).missing == 0
    await sink.close()
    async with store.read() as connection:
        kept = await list_audit_entries(connection, action=ACTION)
    assert sorted(one.detail["missing"] for one in kept) == [0, 2, 4]


async def test_what_engines_served_since_the_last_report(store, url, by):
    sink = LedgerSink(url)
    await sink.write(events(by, 0, 1))
    hours = [replace(by, at=by.at + timedelta(hours=hour)) for hour in range(4)]
    assert (await report(store, hours[0], tiny=100)).engines == (EngineTokens(model="tiny", served=100, billed=20),)
    await sink.write(events(by, 2, 3))
    # a report without engines in between changes nothing
    await report(store, hours[1])
    assert [one.unbilled for one in (await report(store, hours[2], tiny=123)).engines] == [3]
    # started again
    assert [one.unbilled for one in (await report(store, hours[3], tiny=7)).engines] == [None]
    await sink.close()


@pytest.fixture
def page():
    with PageServer(lambda request: Page(PAGE, 200 if request.path == "/metrics" else 404)) as server:
        yield f"{server.url}/metrics"


async def test_tritons_page_is_read(page, monkeypatch):
    assert await served_tokens([page, page]) == {"tiny": 180}
    for other in (f"{page}/none", "http://127.0.0.1:9/metrics", "no url"):
        with pytest.raises(ResourceError, match="cannot be read"):
            await served_tokens([other])
    monkeypatch.setattr("llmops.control.reconcile.MAX_PAGE_BYTES", len(PAGE) - 1)
    with pytest.raises(ResourceError, match="cannot be read"):
        await served_tokens([page])


async def test_the_leader_says_what_is_missing(store, url, by, caplog):
    sink = LedgerSink(url)
    await sink.write(events(by, 0, 3))
    await sink.write([one for at in range(2, 8) for one in events(by, 1, gateway=f"gw-{at}")])
    await sink.close()
    task = asyncio.create_task(Reconciler(url, interval=0.01).run())
    await eventually(lambda: caplog.messages)
    await stop_tasks(task)
    assert caplog.messages[0] == (
        "8 usage events have not arrived: 2 of gateway gw-1 from number 1, 1 of gateway gw-2 from number 0, 1 of "
        "gateway gw-3 from number 0, 1 of gateway gw-4 from number 0, 1 of gateway gw-5 from number 0 and of 2 more. A "
        "gateway sends its events again; start a gateway that does not run."
    )


def test_the_command(url, by, page):
    async def write(*numbers):
        sink = LedgerSink(url)
        await sink.write(events(by, *numbers))
        await sink.close()

    run = CliRunner().invoke
    told = run(cli, ["usage", "reconcile", "--store", url])
    assert (told.exit_code, told.output) == (0, "Missing: 0 events (gateway workers known: 0).\n")
    asyncio.run(write(0, 3))
    told = run(cli, ["usage", "reconcile", "--store", url, "--engine", page])
    assert told.exit_code == 1
    for said in ("gw-1", "1-2", "Missing: 2 events (gateway workers known: 1)"):
        assert said in told.output
    asyncio.run(write(1, 2))
    told = run(cli, ["usage", "reconcile", "--store", url, "--json"])
    assert told.exit_code == 0
    found = json.loads(told.output)
    assert (found["missing"], found["gaps"]) == (0, [])
    # and usage itself is as it was
    assert json.loads(run(cli, ["usage", "--store", url, "--json"]).output)["requests"] == 4
