"""Cost of recording usage, from the request to the ledger.

Goals: 20 µs of CPU per request and 0.2 µs per token in the gateway, 5,000 events/s per core into
the ledger, and no lost event and at most 8 MiB of memory while Kafka is unreachable. Everything
runs in one process without a gateway, and only the CPU time of this process counts. The databases
are on a memory disk if it has room, so that disk writes do not count.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from llmops.control.ledger import Ledger
from llmops.errors import LlmopsError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome, Usage, UsageEvent, UsageRecorder
from llmops.gateway.settings import KafkaSettings
from llmops.gateway.usage.delivery import UsageDelivery
from llmops.gateway.usage.event_formats import from_cloud_event, to_cloud_event
from llmops.gateway.usage.kafka import KafkaSink
from llmops.gateway.usage.ledger_sink import LedgerSink, write_events
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.outbox_writer import OutboxWriter
from llmops.gateway.usage.sink import NoPrices
from llmops.perf.lab.figures import Section
from llmops.store.factory import open_store
from llmops.store.usage_queries import UsageFilter, sum_usage
from tests.support.servers import Broker, Postgres

ROUNDS, EVENTS, TOKENS = 5, 5_000, 500_000
BATCH, BATCHES = 1_000, 10
# Number of events of ten minutes at 500 requests per second.
AWAY = 300_000
ANN = Caller("acme", "00000000-0000-0000-0000-000000000007", "key-1", tier="pro")
CONDITIONS = "One process without HTTP, whose CPU time is measured. A batch of the ledger has 1,000 events of 50 users."


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`. `engine` is not used."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(Path(folder), section))


async def _measure(folder: Path, section: Section) -> None:
    _metering(folder, section)
    await _ledger(f"sqlite:///{folder}/store.db", "SQLite", section)
    with Postgres() as server:
        await _ledger(server.url, "PostgreSQL", section)
    await _kafka_away(folder, section, AWAY)


def _metering(folder: Path, section: Section) -> None:
    outbox, context = _outbox(folder / "gw-1"), RequestContext("req_1", caller=ANN)
    meter = OutboxWriter(folder / "gw-1", outbox, NoPrices())
    costs, per_token = [], []
    for _ in range(ROUNDS):
        costs.append(_cpu(lambda: _requests(meter, context, EVENTS)) / EVENTS)
        tally = meter.recorder(context)
        tally.begin("smollm2", "chatcmpl-8beb6e669f618ec87e5d28e7", 37)
        loop = _cpu(lambda: [None for _ in range(TOKENS)])
        per_token.append((_cpu(partial(_grow, tally)) - loop) / TOKENS)
        tally.end(Outcome(200, "stop", Usage(37, TOKENS)))
    section.add("slot and outbox, per request", 1e6 * statistics.median(costs), "µs/event", 20)
    section.add("slot, per engine message", 1e6 * statistics.median(per_token), "µs/token", 0.2)
    outbox.close()


async def _ledger(url: str, name: str, section: Section) -> None:
    """Add to `section` the events that the ledger writes per second of its CPU time.

    The time is from an event's message to its committed row in the store at `url`. `name` is the
    name of the store in the figure.
    """
    async with await open_store(url) as store:
        own = []
        for batch in range(BATCHES + 1):
            messages = [to_cloud_event(_event(batch * BATCH + at)) for at in range(BATCH)]
            before = time.process_time()
            found = [from_cloud_event(message) for message in messages]
            await store.transact(partial(write_events, events=found))
            # The first batch is not counted, because it compiles the statements.
            if batch:
                own.append(time.process_time() - before)
    section.add(f"ledger, {name}", BATCH / statistics.median(own), "events/s of its CPU", 5_000, "least")


async def _kafka_away(folder: Path, section: Section, count: int) -> None:
    """Record ten minutes of events while Kafka is unreachable, then start the broker.

    The events are made as fast as possible.
    """
    outbox, context = _outbox(folder / "gw-2"), RequestContext("req_1", caller=ANN)
    meter = OutboxWriter(folder / "gw-2", outbox, NoPrices())
    broker = Broker()
    kafka = KafkaSettings(servers=f"127.0.0.1:{broker.port}", signing_keys="0123456789abcdef" * 2)
    url = f"sqlite:///{folder}/away.db"
    sink = KafkaSink(kafka, LedgerSink(url))
    delivery = UsageDelivery(outbox, sink)
    async with _going(delivery.run()):
        await _make(meter, context, count // 100)
        # The memory includes the Kafka client that tries to connect, and its threads.
        while not delivery.trouble:
            await asyncio.sleep(0.05)
        before = _resident()
        await _make(meter, context, count)
        section.add(f"Kafka away for {count:,} requests: memory", (_resident() - before) / 2**20, "MiB", 8)
        with broker:
            async with _going(Ledger(kafka, url).run()):
                await delivery.drain()
    await sink.close()
    async with await open_store(url) as store, store.read() as connection:
        (total,) = await sum_usage(connection, UsageFilter())
    section.add("of them lost", count + count // 100 - total.requests, "events", 0)


async def _make(meter: OutboxWriter, context: RequestContext, count: int) -> None:
    for at in range(count):
        _request(meter, context)
        if at % 50 == 49:
            meter.flush()
            await asyncio.sleep(0)
    meter.flush()


@asynccontextmanager
async def _going(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, LlmopsError):
            await task


def _outbox(folder: Path) -> UsageOutbox:
    folder.mkdir()
    return UsageOutbox(folder)


def _requests(meter: OutboxWriter, context: RequestContext, count: int) -> None:
    """Record `count` requests, and flush the outbox after every 50.

    A gateway with 500 requests per second flushes as often.
    """
    for at in range(count):
        _request(meter, context)
        if at % 50 == 49:
            meter.flush()


def _grow(tally: UsageRecorder) -> None:
    for at in range(TOKENS):
        tally.count(at)


def _request(meter: OutboxWriter, context: RequestContext) -> None:
    tally = meter.recorder(context)
    tally.begin("smollm2", "chatcmpl-8beb6e669f618ec87e5d28e7", 37)
    tally.end(Outcome(200, "stop", Usage(37, 7)), context.started)


def _event(seq: int) -> UsageEvent:
    user = f"00000000-0000-0000-0000-{seq % 50:012x}"
    one, at = f"{seq:08x}-0000-7000-8000-000000000000", datetime.now(UTC)
    made = UsageEvent(one, "gw-1", seq, at, f"chatcmpl-{seq:024x}", "acme", user, "key-1", "smollm2", 37)
    return made._replace(output_tokens=7, cost_micros=12, price_id="m@2026-11-01T00:00:00Z", finish_reason="stop")


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
