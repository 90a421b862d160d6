"""The ledger: events from Kafka into the store, each once.

A topic has other writers than gateways, so each record passes four checks before it is on a bill: its size, its
signature, its fields, and the tables. A record that fails is parked with the reason (`store/dead_letters.py`), and the ledger
goes on. A record that ends the process is stepped over at the third start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from pydantic_core import from_json
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from llmops.clocks import utc_now
from llmops.control import kafka_batches
from llmops.control.leader_jobs import LeaderJob
from llmops.errors import LlmopsError, ResourceError
from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.settings import KafkaSettings
from llmops.gateway.usage.event_formats import from_cloud_event
from llmops.gateway.usage.kafka import client_options, kafka_error_message
from llmops.gateway.usage.ledger_sink import parked_event, write_events
from llmops.gateway.usage.signing import is_signed, signing_keys
from llmops.gateway.usage.sink import retry_delay
from llmops.store.database import Store
from llmops.store.dead_letters import DeadLetter, add_dead_letters
from llmops.store.errors import is_data_error
from llmops.store.factory import open_store
from llmops.store.ledger_read_attempts import clear_read_attempts, record_read_attempt
from llmops.store.uuids import canonical_uuid
from llmops.untrusted_text import escape_unsafe

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

CONSUMER_GROUP = "llmops-ledger"
BATCH_SIZE = 1000
# after which Kafka takes a ledger for dead that it does not hear of
SESSION_TIMEOUT_MS = 10_000
#: Bytes of one event. A gateway writes about 700, and 5,000 with the longest names.
MAX_EVENT_BYTES = 64 * 1024
#: Bytes of one partition, and of all, in an answer to a fetch request. The broker sends one whole batch in any case:
#: its size is bounded by the topic's `max.message.bytes`.
PARTITION_BYTES, FETCH_BYTES = 2**20, 8 * 2**20
#: Processes that may end at an offset before the ledger steps over it.
MAX_CRASHES = 2
#: Records that are read one by one after a process ended while it read.
SINGLE_RECORD_READS = 2 * BATCH_SIZE


class Ledger(LeaderJob):
    """Takes batches, writes each in one transaction with its sums, then tells Kafka: killed in between, a batch comes
    again and changes nothing.
    """

    name = "The ledger"

    def __init__(self, kafka: KafkaSettings, store: str) -> None:
        """Raises InputError without a signing key."""
        self._kafka, self._url, self._keys = kafka, store, signing_keys(kafka)
        self._careful = 0
        self._begun: set[TopicPartition] = set()

    async def run(self) -> None:
        """Raises ResourceError when Kafka is away, and as `open_store` does."""
        kafka_batches.install_safe_records()
        async with await open_store(self._url, pool_size=2) as store:
            consumer = AIOKafkaConsumer(
                self._kafka.topic,
                group_id=CONSUMER_GROUP,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                # while the store is away it stays in the group
                max_poll_interval_ms=24 * 3600 * 1000,
                session_timeout_ms=SESSION_TIMEOUT_MS,
                heartbeat_interval_ms=SESSION_TIMEOUT_MS // 4,
                max_partition_fetch_bytes=PARTITION_BYTES,
                fetch_max_bytes=FETCH_BYTES,
                **client_options(self._kafka),
            )
            self._begun.clear()
            self._careful = 0
            try:
                await consumer.start()
                while True:
                    await self._batch(consumer, store)
            except (KafkaError, OSError) as error:
                await self._clear_read_attempts(store)
                raise ResourceError(kafka_error_message(self._kafka, error)) from error
            except asyncio.CancelledError:
                await self._clear_read_attempts(store)
                raise
            finally:
                # half a stop would leave it in the group, with partitions that nobody reads
                await asyncio.shield(consumer.stop())

    async def _batch(self, consumer: AIOKafkaConsumer, store: Store) -> None:
        for partition in consumer.assignment() - self._begun:
            await self._begin(consumer, store, partition)
        found = await consumer.getmany(timeout_ms=1000, max_records=1 if self._careful else BATCH_SIZE)
        if kafka_batches.REJECTED:
            await self._park(store, _take_rejected_batches(self._kafka.topic))
        if not found:
            await _rewind_truncated_partitions(consumer)
            return
        self._careful = max(self._careful - 1, 0)
        events, refused = self._validate_records([one for records in found.values() for one in records])
        await self._park(store, refused)
        await write_until_accepted(store, events)
        behind = _next_offsets(found)
        if self._careful:
            # the next offset may be the one that ends the process
            for partition, offset in behind.items():
                await _record_read_attempt(store, partition, offset)
        await consumer.commit(behind)

    async def _begin(self, consumer: AIOKafkaConsumer, store: Store, partition: TopicPartition) -> None:
        """Note that reading begins here, and step over an offset at which `MAX_CRASHES` processes ended."""
        self._begun.add(partition)
        offset = await consumer.position(partition)
        if (await consumer.end_offsets([partition]))[partition] <= offset:
            return
        deaths = await _record_read_attempt(store, partition, offset)
        if deaths >= MAX_CRASHES:
            source = f"{partition.topic}[{partition.partition}] at {offset}"
            log.error("%s ended the ledger's process %d times and is skipped.", source, deaths)
            await self._park(store, [DeadLetter("ended the process", source, source.encode())])
            consumer.seek(partition, offset + 1)
            await consumer.commit({partition: offset + 1})
            await _record_read_attempt(store, partition, offset + 1)
        if deaths:
            self._careful = SINGLE_RECORD_READS

    async def _clear_read_attempts(self, store: Store) -> None:
        """Forget where reading began: the process was not ended by what it read."""
        try:
            await store.transact(partial(clear_read_attempts, topic=self._kafka.topic))
        except (LlmopsError, SQLAlchemyError) as error:
            log.warning(
                "The ledger's position cannot be stored (%s); it goes on, and stores the next one.",
                type(error).__name__,
            )

    def _validate_records(self, records: Iterable[ConsumerRecord]) -> tuple[list[UsageEvent], list[DeadLetter]]:
        """Return the events among the records, and the records that are none."""
        events, refused = [], []
        for record in records:
            one = self._validate_record(record)
            if isinstance(one, UsageEvent):
                events.append(one)
            else:
                refused.append(one)
        return events, refused

    def _validate_record(self, record: ConsumerRecord) -> UsageEvent | DeadLetter:
        value = record.value or b""
        source = f"{record.topic}[{record.partition}] at {record.offset}"
        if len(value) > MAX_EVENT_BYTES:
            return DeadLetter("too large", source, value[:MAX_EVENT_BYTES])
        if not is_signed(self._keys, value, record.headers):
            return DeadLetter("not signed by a gateway", source, value)
        try:
            return from_cloud_event(value)
        except (ValueError, OverflowError, RecursionError) as error:
            fault = str(error) if isinstance(error, ValueError) else type(error).__name__
            return DeadLetter("not an event of usage", f"{source}: {fault}", value, _id_in(value))

    async def _park(self, store: Store, refused: Sequence[DeadLetter]) -> None:
        if refused:
            _log_dead_letters(refused)
            await _transact_with_retry(store, partial(add_dead_letters, parked=refused, at=utc_now()))


async def _record_read_attempt(store: Store, partition: TopicPartition, offset: int) -> int:
    """Note where reading begins. Return the number of processes that ended there."""
    return await _transact_with_retry(
        store, partial(record_read_attempt, topic=partition.topic, partition=partition.partition, offset=offset)
    )


async def _rewind_truncated_partitions(consumer: AIOKafkaConsumer) -> None:
    """Where a log is shorter than what was read of it: brokers have lost it, but not how far it was read, or were told
    so afterwards. Nothing would be read until it is as long as before; what is read twice is kept once."""
    ends = {one: consumer.highwater(one) for one in consumer.assignment()}
    lost = [one for one, end in ends.items() if end is not None and end < await consumer.position(one)]
    if lost:
        log.warning("%d logs of %s are shorter than before; they are read again.", len(lost), lost[0].topic)
        await consumer.seek_to_beginning(*lost)


async def write_until_accepted(store: Store, events: Sequence[UsageEvent]) -> None:
    """Write the events as soon as the store is there to take them.

    When writing fails for another reason, the events are halved until the one that causes it is alone; it is parked.
    """
    if not events:
        return
    try:
        await _transact_with_retry(store, partial(write_events, events=events))
    except Exception as error:
        if len(events) > 1:
            middle = len(events) // 2
            await write_until_accepted(store, events[:middle])
            await write_until_accepted(store, events[middle:])
            return
        if not is_data_error(error):
            raise
        refused = [parked_event(events[0], "refused by the tables")]
        _log_dead_letters(refused)
        await _transact_with_retry(store, partial(add_dead_letters, parked=refused, at=utc_now()))


async def _transact_with_retry(store: Store, work: Callable[[Connection], ResultT]) -> ResultT:
    """Do `work` in one transaction, as soon as the store is there."""
    failures, told_last = 0, ""
    while True:
        try:
            answer = await store.transact(work)
        except LlmopsError as error:
            if error.message != told_last:
                log.error("The ledger cannot write, and waits for the store. %s", error.message)
            told_last = error.message
            await asyncio.sleep(retry_delay(failures))
            failures += 1
        else:
            if failures:
                log.warning("The ledger writes again.")
            return answer


def _take_rejected_batches(topic: str) -> list[DeadLetter]:
    """Return what was refused since the last call, before it was unpacked."""
    refused, kafka_batches.REJECTED[:] = list(kafka_batches.REJECTED), []
    return [DeadLetter(reason, f"{topic} at {offset}", f"{topic} {offset}".encode()) for reason, offset in refused]


def _log_dead_letters(refused: Sequence[DeadLetter]) -> None:
    """Write one line for each reason, however many there are."""
    for reason, count in Counter(one.reason for one in refused).items():
        first = next(one for one in refused if one.reason == reason)
        log.error("%d records of usage are parked (%s), the first is %s.", count, reason, escape_unsafe(first.source))


def _id_in(value: bytes) -> str | None:
    """Return the id of an event whose other fields are wrong, or None."""
    try:
        return canonical_uuid(from_json(value)["id"])
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def _next_offsets(found: Mapping[TopicPartition, Sequence[ConsumerRecord]]) -> dict[TopicPartition, int]:
    return {partition: records[-1].offset + 1 for partition, records in found.items() if records}
