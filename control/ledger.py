"""The ledger, which writes usage events from Kafka to the store, each event once.

Other programs than gateways may write to a topic. Each record therefore passes four checks before
it is billed: its size, its signature, its fields, and the constraints of the tables. A record that
fails becomes a dead letter with the reason, and the ledger continues. A record at which the process
crashed twice is skipped at the third start.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from pydantic_core import from_json
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from llmops.background import LogOnce
from llmops.clocks import utc_now
from llmops.control import kafka_batches
from llmops.control.hidden_batches import find_next_offset
from llmops.control.leader_jobs import LeaderJob
from llmops.errors import LlmopsError, ResourceError
from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.logging_setup import RepeatedLines
from llmops.gateway.settings import KafkaSettings
from llmops.gateway.usage.event_formats import from_cloud_event
from llmops.gateway.usage.kafka import client_options, kafka_error_message
from llmops.gateway.usage.ledger_sink import parked_event, write_events
from llmops.gateway.usage.signing import is_signed, signing_keys
from llmops.gateway.usage.sink import retry_delay
from llmops.store.columns import canonical_uuid
from llmops.store.database import Store
from llmops.store.dead_letters import DeadLetter, add_dead_letters, clear_read_attempts, record_read_attempt
from llmops.store.errors import is_data_error
from llmops.store.factory import open_store
from llmops.untrusted_text import escape_unsafe

log = logging.getLogger(__name__)

#: Limits the log to a line per second for each reason, because anyone who can write to the topic
#: decides how many records become dead letters.
_PARKED = RepeatedLines(1.0)

ResultT = TypeVar("ResultT")

#: Name of the Kafka consumer group to which all ledgers of a topic belong.
CONSUMER_GROUP = "llmops-ledger"

#: Maximum number of records in a batch, which one transaction writes. Other writers of SQLite wait
#: for the transaction.
BATCH_SIZE = 1000

#: Maximum number of records in a batch after a batch without any event. A program can send small
#: records faster than transactions of a thousand could store them as dead letters, and events would
#: wait.
FLOOD_BATCH_SIZE = 5000

#: Milliseconds without a heartbeat after which Kafka removes this consumer from its group, so that
#: the ledger of the next leader gets its partitions.
SESSION_TIMEOUT_MS = 10_000

#: Milliseconds between two polls after which Kafka removes this consumer from its group. A day, so
#: that the consumer stays in its group while the store cannot be reached.
MAX_POLL_INTERVAL_MS = 24 * 3600 * 1000

#: Milliseconds that a fetch waits for records, after which the ledger does its other work.
POLL_TIMEOUT_MS = 1000

#: Maximum size of an event in bytes. Events of a gateway have about 700 bytes, and 5,000 with the
#: longest names.
MAX_EVENT_BYTES = 64 * 1024

#: Maximum bytes of one partition in the response to a fetch. A larger single batch is sent whole;
#: the topic's `max.message.bytes` bounds it.
PARTITION_BYTES = 2**20

#: Maximum bytes of all partitions in the response to a fetch, which bounds the memory.
FETCH_BYTES = 8 * 2**20

_FETCH_OPTIONS = {"max_partition_fetch_bytes": PARTITION_BYTES, "fetch_max_bytes": FETCH_BYTES}

#: Seconds at one offset below the end of a partition after which the ledger checks whether the
#: broker returns anything. Longer than a broker needs to become the leader of a partition.
STALL_SECONDS = 5.0

#: Maximum seconds of such a check, which delays other partitions.
STALL_CHECK_SECONDS = 60.0

#: Number of processes that may crash at an offset before the ledger skips the offset. More than
#: one, because a single crash may have another cause.
MAX_CRASHES = 2

#: Number of records that are read one by one after a crash, to find the record that caused it.
SINGLE_RECORD_READS = 2 * BATCH_SIZE


class Ledger(LeaderJob):
    """The job that consumes usage events in batches.

    Each batch is written in one transaction before its offsets are committed. A crash therefore
    causes repeated reads, but no double billing.
    """

    name = "The ledger"

    def __init__(self, kafka: KafkaSettings, store: str) -> None:
        """Create the job and read its signing keys. No broker is contacted yet.

        Raises:
            InputError: The settings have no signing key.
        """
        self._kafka, self._store_url, self._keys = kafka, store, signing_keys(kafka)
        self._single_reads_left = 0
        self._is_flooded = False
        self._begun: set[TopicPartition] = set()
        self._positions: dict[TopicPartition, tuple[int, float]] = {}

    async def run(self) -> None:
        """Consume events until cancelled.

        Raises:
            ResourceError: Kafka does not answer.
            LlmopsError: The store cannot be opened.
        """
        kafka_batches.install_safe_records()
        async with await open_store(self._store_url, pool_size=2) as store:
            consumer = AIOKafkaConsumer(
                self._kafka.topic,
                group_id=CONSUMER_GROUP,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                max_poll_interval_ms=MAX_POLL_INTERVAL_MS,
                session_timeout_ms=SESSION_TIMEOUT_MS,
                heartbeat_interval_ms=SESSION_TIMEOUT_MS // 4,
                **_FETCH_OPTIONS,
                **client_options(self._kafka),
            )
            self._begun.clear()
            self._positions.clear()
            self._single_reads_left = 0
            try:
                await consumer.start()
                while True:
                    await self._process_batch(consumer, store)
            except (KafkaError, OSError) as error:
                await self._clear_read_attempts(store)
                raise ResourceError(kafka_error_message(self._kafka, error)) from error
            except asyncio.CancelledError:
                await self._clear_read_attempts(store)
                raise
            finally:
                # an interrupted stop would leave the consumer in its group, with partitions that
                # are not read
                await asyncio.shield(consumer.stop())

    async def _process_batch(self, consumer: AIOKafkaConsumer, store: Store) -> None:
        for partition in consumer.assignment() - self._begun:
            await self._begin_partition(consumer, store, partition)
        size = 1 if self._single_reads_left else FLOOD_BATCH_SIZE if self._is_flooded else BATCH_SIZE
        batch = await consumer.getmany(timeout_ms=POLL_TIMEOUT_MS, max_records=size)
        if kafka_batches.REJECTED:
            await _add_dead_letters(store, _take_rejected_batches(self._kafka.topic))
        await self._leave_hidden_batches(consumer, store)
        if not batch:
            if (reader := consumer._fetcher.error_future).done():
                # after an unexpected response, the library stops fetching without an error
                reader.result()
            await _rewind_truncated_partitions(consumer)
            return
        self._single_reads_left = max(self._single_reads_left - 1, 0)
        events, rejected = self._validate_records([record for records in batch.values() for record in records])
        self._is_flooded = not events
        await _add_dead_letters(store, rejected)
        await write_until_accepted(store, events)
        offsets = {partition: records[-1].offset + 1 for partition, records in batch.items() if records}
        if self._single_reads_left:
            # record the next offset before it is read: its record may crash the process
            for partition, offset in offsets.items():
                await _record_read_attempt(store, partition, offset)
        await consumer.commit(offsets)

    async def _begin_partition(self, consumer: AIOKafkaConsumer, store: Store, partition: TopicPartition) -> None:
        """Record where reading begins. Skip an offset at which MAX_CRASHES processes crashed."""
        self._begun.add(partition)
        offset = await consumer.position(partition)
        if (await consumer.end_offsets([partition]))[partition] <= offset:
            return
        crashes = await _record_read_attempt(store, partition, offset)
        if crashes >= MAX_CRASHES:
            source = f"{partition.topic}[{partition.partition}] at {offset}"
            log.error(
                "The record at %s crashed the ledger's process %d times; the ledger skips it and stores a dead letter.",
                source,
                crashes,
            )
            await _add_dead_letters(store, [DeadLetter("ended the process", source, source.encode())])
            consumer.seek(partition, offset + 1)
            await consumer.commit({partition: offset + 1})
            await _record_read_attempt(store, partition, offset + 1)
        if crashes:
            self._single_reads_left = SINGLE_RECORD_READS

    async def _leave_hidden_batches(self, consumer: AIOKafkaConsumer, store: Store) -> None:
        """Continue after batches that the broker does not return, and store a dead letter for each."""
        ends = {partition: consumer.highwater(partition) for partition in consumer.assignment()}
        for partition, end in ends.items():
            position, now = await consumer.position(partition), time.monotonic()
            known, since = self._positions.get(partition, (None, now))
            waits = position == known and end is not None and position < end
            if waits and now - since < STALL_SECONDS:
                continue
            self._positions[partition] = position, now
            if waits:
                await self._leave_hidden_batch(consumer, store, partition, position)

    async def _leave_hidden_batch(
        self, consumer: AIOKafkaConsumer, store: Store, partition: TopicPartition, position: int
    ) -> None:
        place = f"{partition.topic}[{partition.partition}] at"
        try:
            async with asyncio.timeout(STALL_CHECK_SECONDS):
                following = await find_next_offset(
                    partition, position, {**_FETCH_OPTIONS, **client_options(self._kafka)}
                )
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning(
                "The ledger cannot check what follows %s %d (%s); it retries.", place, position, type(error).__name__
            )
            return
        finally:
            # the search read some of these batches a second time
            read, kafka_batches.REJECTED[:] = {offset for _, offset in kafka_batches.REJECTED}, []
        if following is not None:
            passed = sorted({position, *(offset for offset in read if position < offset < following)})
            sources = [f"{place} {offset}" for offset in passed]
            await _add_dead_letters(store, [DeadLetter(kafka_batches.DAMAGED, one, one.encode()) for one in sources])
            consumer.seek(partition, following)
            await consumer.commit({partition: following})

    async def _clear_read_attempts(self, store: Store) -> None:
        """Delete the record of where reading began, because reading did not crash the process."""
        try:
            await store.transact(partial(clear_read_attempts, topic=self._kafka.topic))
        except (LlmopsError, SQLAlchemyError) as error:
            log.warning(
                "The ledger's position cannot be stored (%s); the ledger continues and stores a later position.",
                type(error).__name__,
            )

    def _validate_records(self, records: Iterable[ConsumerRecord]) -> tuple[list[UsageEvent], list[DeadLetter]]:
        """Split records into valid events and dead letters."""
        events, rejected = [], []
        for record in records:
            result = self._validate_record(record)
            if isinstance(result, UsageEvent):
                events.append(result)
            else:
                rejected.append(result)
        return events, rejected

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
            reason = str(error) if isinstance(error, ValueError) else type(error).__name__
            return DeadLetter("not an event of usage", f"{source}: {reason}", value, _event_id(value))


async def write_until_accepted(store: Store, events: Sequence[UsageEvent]) -> None:
    """Write events as soon as the store answers.

    If the tables reject a batch, the batch is halved until the event that causes the error is
    alone. This event becomes a dead letter.
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
        await _add_dead_letters(store, [parked_event(events[0], "refused by the tables")])


async def _record_read_attempt(store: Store, partition: TopicPartition, offset: int) -> int:
    """Record where reading begins.

    Return the number of processes that began at the same offset and crashed there.
    """
    return await _transact_with_retry(
        store, partial(record_read_attempt, topic=partition.topic, partition=partition.partition, offset=offset)
    )


async def _rewind_truncated_partitions(consumer: AIOKafkaConsumer) -> None:
    """Seek to the beginning of partitions whose log is shorter than the committed offset.

    Brokers lost records of such a partition. Without the seek, nothing would be read until the log
    is as long as before. The store ignores events that it already has.
    """
    ends = {partition: consumer.highwater(partition) for partition in consumer.assignment()}
    lost = [
        partition for partition, end in ends.items() if end is not None and end < await consumer.position(partition)
    ]
    if lost:
        log.warning(
            "%d partitions of the topic %s are shorter than before, because brokers lost records; the ledger reads the "
            "partitions from the start.",
            len(lost),
            lost[0].topic,
        )
        await consumer.seek_to_beginning(*lost)


async def _transact_with_retry(store: Store, work: Callable[[Connection], ResultT]) -> ResultT:
    """Run `work` in one transaction as soon as the store answers, and return its result."""
    problems, failures = LogOnce(), 0
    while True:
        try:
            result = await store.transact(work)
        except LlmopsError as error:
            if problems.is_new("store", error.message):
                log.error("The ledger cannot write and waits for the store. %s", error.message)
            await asyncio.sleep(retry_delay(failures))
            failures += 1
        else:
            if failures:
                log.warning("The store answers, and the ledger writes again.")
            return result


def _take_rejected_batches(topic: str) -> list[DeadLetter]:
    """Return the dead letters for batches rejected since the last call."""
    rejected, kafka_batches.REJECTED[:] = list(kafka_batches.REJECTED), []
    return [DeadLetter(reason, f"{topic} at {offset}", f"{topic} {offset}".encode()) for reason, offset in rejected]


async def _add_dead_letters(store: Store, letters: Sequence[DeadLetter]) -> None:
    """Store dead letters, and log a line per second for each reason."""
    for reason, count in Counter(letter.reason for letter in letters).items():
        source = next(letter.source for letter in letters if letter.reason == reason)
        if (more := _PARKED.suffix(reason)) is not None:
            first = escape_unsafe(source)
            log.error(
                "%d usage records cannot be billed (%s), the first is %s; `llmops usage dead-letters` lists them.%s",
                count,
                reason,
                first,
                more,
            )
    if letters:
        await _transact_with_retry(store, partial(add_dead_letters, parked=letters, at=utc_now()))


def _event_id(value: bytes) -> str | None:
    """Return the event's id if the value is an event with other invalid fields, or None."""
    try:
        return canonical_uuid(from_json(value)["id"])
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
