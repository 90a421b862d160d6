"""The ledger: events from Kafka into the store, each once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from sqlalchemy.exc import SQLAlchemyError

from llmops.control.duties import Duty
from llmops.errors import LlmopsError, ResourceError
from llmops.gateway.callers.usage.base import pause
from llmops.gateway.callers.usage.direct import write_events
from llmops.gateway.callers.usage.events import from_cloud_event
from llmops.gateway.callers.usage.kafka import connection, told
from llmops.gateway.messages import UsageEvent
from llmops.gateway.settings import KafkaSettings
from llmops.store.database import Store
from llmops.store.open import open_store

log = logging.getLogger(__name__)

GROUP = "llmops-ledger"
BATCH = 1000
# after which Kafka takes a ledger for dead that it does not hear of
SESSION_MS = 10_000


class Ledger(Duty):
    """Takes batches, writes each in one transaction with its sums, then tells Kafka: killed in between, a batch comes
    again and changes nothing.
    """

    name = "The ledger"

    def __init__(self, kafka: KafkaSettings, store: str) -> None:
        self._kafka, self._url = kafka, store

    async def run(self) -> None:
        """Raises ResourceError when Kafka is away, and as `open_store` does."""
        async with await open_store(self._url, pool_size=2) as store:
            consumer = AIOKafkaConsumer(
                self._kafka.topic,
                group_id=GROUP,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                # while the store is away it stays in the group
                max_poll_interval_ms=24 * 3600 * 1000,
                session_timeout_ms=SESSION_MS,
                heartbeat_interval_ms=SESSION_MS // 4,
                **connection(self._kafka),
            )
            try:
                await consumer.start()
                while True:
                    await self._batch(consumer, store)
            except (KafkaError, OSError) as error:
                raise ResourceError(told(self._kafka, error)) from error
            finally:
                # half a stop would leave it in the group, with partitions that nobody reads
                await asyncio.shield(consumer.stop())

    async def _batch(self, consumer: AIOKafkaConsumer, store: Store) -> None:
        found = await consumer.getmany(timeout_ms=1000, max_records=BATCH)
        if not found:
            await _begin_again(consumer)
            return
        await kept(store, [event for records in found.values() for event in events_of(records)])
        await consumer.commit(_behind(found))


async def _begin_again(consumer: AIOKafkaConsumer) -> None:
    """Where a log is shorter than what was read of it: brokers have lost it, but not how far it was read, or were told
    so afterwards. Nothing would be read until it is as long as before; what is read twice is kept once."""
    ends = {one: consumer.highwater(one) for one in consumer.assignment()}
    lost = [one for one, end in ends.items() if end is not None and end < await consumer.position(one)]
    if lost:
        log.warning("%d logs of %s are shorter than before; they are read again.", len(lost), lost[0].topic)
        await consumer.seek_to_beginning(*lost)


def events_of(records: Iterable[ConsumerRecord]) -> Iterable[UsageEvent]:
    """Those that are events of usage; another stops nobody, and is told."""
    for record in records:
        try:
            yield from_cloud_event(record.value or b"")
        except ValueError as error:
            log.error("%s[%d] at %d is passed over: %s.", record.topic, record.partition, record.offset, error)


async def kept(store: Store, events: Sequence[UsageEvent]) -> None:
    """As soon as the store is there to take them."""
    failures = 0
    while events:
        try:
            await _insert(store, events)
            if failures:
                log.warning("The ledger goes on.")
            return
        except LlmopsError as error:
            if not failures:
                log.error("The ledger waits. %s", error.message)
            await asyncio.sleep(pause(failures))
            failures += 1


async def _insert(store: Store, events: Sequence[UsageEvent]) -> None:
    """One that the tables do not take is left out, alone. Raises LlmopsError for a store that is away."""
    try:
        await store.transact(partial(write_events, events=events))
    except (SQLAlchemyError, ValueError, TypeError) as error:
        if len(events) == 1:
            log.error("The event %s cannot be kept (%s).", events[0].id, type(error).__name__)
            return
        middle = len(events) // 2
        await _insert(store, events[:middle])
        await _insert(store, events[middle:])


def _behind(found: dict[TopicPartition, list[ConsumerRecord]]) -> dict[TopicPartition, int]:
    return {partition: records[-1].offset + 1 for partition, records in found.items() if records}
