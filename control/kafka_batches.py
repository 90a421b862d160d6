"""Safe unpacking of Kafka batches: suspicious batches are rejected before they are unpacked.

A compressed batch of a few hundred kilobytes can unpack to gigabytes, and the client library
unpacks it whole, on the event loop, before the records can be checked. Gateways do not compress, so
compressed batches are skipped.

Batches with a wrong checksum, with unreadable records, or in a format before Kafka 0.11 are skipped
too, because the library would fetch them again forever. Gateways send unconfirmed events again.
"""

import logging
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from struct import Struct
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords

from llmops.distribution import install_command
from llmops.errors import ResourceError

log = logging.getLogger(__name__)

#: Reasons for rejecting a batch, which become the reasons of dead letters.
COMPRESSED = "compressed batch"
DAMAGED = "damaged batch"
OLD_FORMAT = "batch in an old format"

#: Layout of a batch's first fields, in every format: the offset, and the number of bytes that
#: follow.
_HEADER = Struct(">qi")

#: Minimum size of a batch in bytes: offset, length, checksum, and the byte with the format.
_MIN_BATCH_BYTES = 17

#: Maximum number of offsets that one batch may cover, which take a fifth of a second to read. A
#: batch of a gateway covers some hundreds.
MAX_RECORDS = 2**16


class RejectedBatch:
    """An empty batch that replaces a rejected batch."""

    producer_id = -1
    is_control_batch = is_transactional = False

    def __init__(self, base_offset: int, next_offset: int) -> None:
        self.base_offset, self.next_offset = base_offset, next_offset

    def validate_crc(self) -> bool:
        """Return True, because the checksum was already checked."""
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ReadBatch(RejectedBatch):
    """A batch whose records have all been read without an error."""

    def __init__(self, batch: DefaultRecordBatch, records: list[Any]) -> None:
        super().__init__(batch.base_offset, batch.next_offset)
        self.is_control_batch = batch.is_control_batch
        self._records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)


class SafeRecords:
    """The batches of one partition in the response to a fetch.

    This class replaces the library's `MemoryRecords`.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def has_next(self) -> bool:
        """Return True if another complete batch follows."""
        return self._batch_bytes() > 0

    def next_batch(self) -> Any:
        """Return the next batch, or a RejectedBatch in its place."""
        end_of_batch = self._position + self._batch_bytes()
        data = self._data[self._position : end_of_batch]
        (base, _), self._position = _HEADER.unpack_from(data), end_of_batch
        # Tansu repeats the last batch of a topic if the batch has fewer records than offsets
        while self._base_offset() == base:
            self._position += self._batch_bytes()
        end = base + 1
        try:
            # parse each batch alone: the library's reader of several batches fails if they mix
            # formats
            batch = MemoryRecords(data).next_batch()
            if not isinstance(batch, DefaultRecordBatch):
                return _reject(OLD_FORMAT, base, end)
            if not 0 < batch.next_offset - base <= MAX_RECORDS:
                # check `next_offset`, because the consumer continues there without any check; without
                # another batch only `next_offset` leads out of this one, which would be fetched again
                following = self._base_offset()
                return _reject(DAMAGED, base, max(end, batch.next_offset if following is None else following))
            end = batch.next_offset
            if batch.compression_type:
                return _reject(COMPRESSED, base, end)
            if batch.validate_crc():
                records = list(batch)
                # check the offsets of the records: brokers do not, and the ledger commits the last
                # of them
                offsets = (base - 1, *(record.offset for record in records), end)
                if all(one < following for one, following in pairwise(offsets)):
                    return ReadBatch(batch, records)
        # the library's C code raises other errors too, such as SystemError for a negative size
        except Exception:
            log.debug(
                "The batch at offset %d cannot be read; the ledger skips it and records a dead letter.",
                base,
                exc_info=True,
            )
        return _reject(DAMAGED, base, end)

    def size_in_bytes(self) -> int:
        """Return the size of the partition in the response, including an incomplete last batch."""
        return len(self._data)

    def _base_offset(self) -> int | None:
        """Return the offset of the next batch, or None if no complete batch follows."""
        return _HEADER.unpack_from(self._data, self._position)[0] if self.has_next() else None

    def _batch_bytes(self) -> int:
        """Return the size of the next batch in bytes, or 0 if the batch is incomplete."""
        left = len(self._data) - self._position
        if left <= _MIN_BATCH_BYTES:
            return 0
        _, length = _HEADER.unpack_from(self._data, self._position)
        size = _HEADER.size + length
        return size if _MIN_BATCH_BYTES < size <= left else 0


def _reject(reason: str, offset: int, next_offset: int) -> RejectedBatch:
    REJECTED.append((reason, offset))
    return RejectedBatch(offset, next_offset)


#: Reasons and offsets of the batches rejected since the ledger last emptied this list.
REJECTED: list[tuple[str, int]] = []


def install_safe_records() -> None:
    """Make every Kafka consumer of this process unpack with SafeRecords.

    Raises:
        ResourceError: The installed library unpacks in a way that this module does not support.
    """
    if getattr(fetcher, "MemoryRecords", None) not in (MemoryRecords, SafeRecords):
        raise ResourceError(
            f"aiokafka {version('aiokafka')} unpacks records in a way that llmops cannot bound. Install the version "
            f"that llmops requires with: {install_command('kafka')}"
        )
    fetcher.MemoryRecords = SafeRecords
