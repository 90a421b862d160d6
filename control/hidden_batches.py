"""A search for the next readable offset of a Kafka partition whose broker returns nothing.

Tansu returns no bytes and no error from the offsets of a batch with the record count 0, which any
program that can write to the topic can send. Apache Kafka rejects such a batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

#: Maximum milliseconds until a response without records. Less than the library's 500, because the
#: search of an interval of two thousand million offsets takes some sixty such responses.
_FETCH_WAIT_MS = 100

#: Milliseconds of one look for a response.
_POLL_MS = 200


async def find_next_offset(partition: TopicPartition, position: int, options: dict[str, Any]) -> int | None:
    """Return the next offset to read, or None if `position` is readable or no later offset is yet.

    A separate consumer fetches this partition alone, because a broker that fills a response with
    other partitions may return nothing of this one. The search first reads from before `position`,
    because the broker then returns the hidden batch, and so no readable record is skipped. If
    nothing before `position` is readable, the search looks for a readable offset after `position`.
    Apache Kafka returns the next batch after compacted records, after control batches and, without
    `read_committed`, after aborted records, so nothing there is skipped. A record that is skipped
    all the same is not lost, because gateways send events until the store has them.

    Args:
        partition: The partition.
        position: The offset from which nothing was returned.
        options: Options of the consumer, without a group.

    Raises:
        KafkaError: Kafka does not answer, or answers with an error.
    """
    options = {**options, "fetch_max_wait_ms": _FETCH_WAIT_MS}
    async with AIOKafkaConsumer(enable_auto_commit=False, auto_offset_reset="none", **options) as consumer:
        consumer.assign([partition])
        start = (await consumer.beginning_offsets([partition]))[partition]
        end = (await consumer.end_offsets([partition]))[partition]
        if await _is_readable(consumer, partition, position):
            return None
        before = await _nearest_readable(consumer, partition, position, -1, position - start)
        if before is not None:
            reached = await _read_up_to(consumer, partition, before, position)
            if reached is not None:
                return reached
        return await _nearest_readable(consumer, partition, position, 1, end - 1 - position)


async def _nearest_readable(
    consumer: AIOKafkaConsumer, partition: TopicPartition, position: int, direction: int, limit: int
) -> int | None:
    """Return the readable offset that is nearest to the hidden `position`, or None.

    Args:
        consumer: A consumer that reads only `partition`.
        partition: The partition.
        position: An offset from which the broker returns nothing.
        direction: -1 to search before the position, 1 to search after it.
        limit: Maximum distance from the position.
    """
    hidden = position
    for distance in _distances(limit):
        readable = position + direction * distance
        if await _is_readable(consumer, partition, readable):
            break
        hidden = readable
    else:
        return None
    while abs(readable - hidden) > 1:
        middle = (readable + hidden) // 2
        if await _is_readable(consumer, partition, middle):
            readable = middle
        else:
            hidden = middle
    return readable


def _distances(limit: int) -> Iterator[int]:
    """Return 1, 2, 4 and so on, and `limit` as the last."""
    distance = 1
    while distance < limit:
        yield distance
        distance *= 2
    if limit > 0:
        yield limit


async def _is_readable(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> bool:
    """Return True if the broker returns a batch from this offset."""
    consumer.seek(partition, offset)
    return await _poll(consumer, partition, max_records=1) is not None


async def _read_up_to(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int, position: int) -> int | None:
    """Return the first offset from `position` on that reading from `offset` reaches, or None."""
    consumer.seek(partition, offset)
    while (records := await _poll(consumer, partition)) is not None:
        for record in records:
            if record.offset >= position:
                return int(record.offset)
        if (reached := int(await consumer.position(partition))) > position:
            return reached
    return None


async def _poll(
    consumer: AIOKafkaConsumer, partition: TopicPartition, max_records: int | None = None
) -> Sequence[ConsumerRecord] | None:
    """Return the records of the next response, or None if the response is empty."""
    position, responded = await consumer.position(partition), consumer.last_poll_timestamp(partition)
    while True:
        records: Sequence[ConsumerRecord] = (await consumer.getmany(timeout_ms=_POLL_MS, max_records=max_records)).get(
            partition, ()
        )
        # the position also moves past batches without records
        if records or await consumer.position(partition) != position:
            return records
        if consumer.last_poll_timestamp(partition) != responded:
            return None
