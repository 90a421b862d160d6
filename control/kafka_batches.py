"""Safe unpacking of Kafka batches.

Compressed and damaged batches are rejected before the client library unpacks them.

A batch of a few hundred kilobytes can unpack to gigabytes, and the library unpacks it whole, on the
event loop, before its records can be checked. Gateways do not compress, so a compressed batch is
skipped. A batch with a wrong checksum or records that cannot be read, and one in a format before
Kafka 0.11, is skipped too, because the library would fetch it again forever. Gateways resend what
was not confirmed.
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

#: Reasons for rejecting a batch, as dead letters have them.
COMPRESSED = "compressed batch"
DAMAGED = "damaged batch"
OLD_FORMAT = "batch in an old format"

#: The first fields of a batch in each format: its offset, and the number of bytes that follow.
_HEADER = Struct(">qi")

#: Bytes of the smallest batch: offset, length, checksum, and the byte with the format.
_MIN_BATCH_BYTES = 17

#: Offsets that one batch may cover, which is read in a fifth of a second. A gateway's batch has some
#: hundreds.
MAX_RECORDS = 2**16


class RejectedBatch:
    """An empty batch in place of a rejected one."""

    producer_id = -1
    is_control_batch = is_transactional = False

    def __init__(self, base_offset: int, next_offset: int) -> None:
        self.base_offset, self.next_offset = base_offset, next_offset

    def validate_crc(self) -> bool:
        """Return True: the checksum was checked already."""
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ReadBatch(RejectedBatch):
    """A batch whose records were all read without an error."""

    def __init__(self, batch: DefaultRecordBatch, records: list[Any]) -> None:
        super().__init__(batch.base_offset, batch.next_offset)
        self.is_control_batch = batch.is_control_batch
        self._records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)


class SafeRecords:
    """The batches of one partition in the response to a fetch.

    This class takes the place of the library's `MemoryRecords`.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def has_next(self) -> bool:
        """Return True if there is another whole batch."""
        return self._batch_bytes() > 0

    def next_batch(self) -> Any:
        """Return the next batch, or a RejectedBatch in its place."""
        end_of_batch = self._position + self._batch_bytes()
        data = self._data[self._position : end_of_batch]
        (base, _), self._position = _HEADER.unpack_from(data), end_of_batch
        end = base + 1
        try:
            # the library's reader of several batches fails where formats are mixed
            batch = MemoryRecords(data).next_batch()
            if not isinstance(batch, DefaultRecordBatch):
                return _reject(OLD_FORMAT, base, end)
            if not 0 < batch.next_offset - base <= MAX_RECORDS:
                # the consumer would go on reading at `next_offset`, wherever that is
                return _reject(DAMAGED, base, end)
            end = batch.next_offset
            if batch.compression_type:
                return _reject(COMPRESSED, base, end)
            if batch.validate_crc():
                records = list(batch)
                # brokers do not check the offsets of records, the last of which the ledger commits
                offsets = (base - 1, *(record.offset for record in records), end)
                if all(one < following for one, following in pairwise(offsets)):
                    return ReadBatch(batch, records)
        except Exception:  # of the library's C code too, such as SystemError for a negative size
            log.debug("The batch at offset %d cannot be read.", base, exc_info=True)
        return _reject(DAMAGED, base, end)

    def size_in_bytes(self) -> int:
        """Return the bytes of the partition in the response, including an incomplete last batch."""
        return len(self._data)

    def _batch_bytes(self) -> int:
        """Return the bytes of the next batch, or 0 if it is not whole."""
        left = len(self._data) - self._position
        if left <= _MIN_BATCH_BYTES:
            return 0
        _, length = _HEADER.unpack_from(self._data, self._position)
        size = _HEADER.size + length
        return size if _MIN_BATCH_BYTES < size <= left else 0


def _reject(reason: str, offset: int, next_offset: int) -> RejectedBatch:
    REJECTED.append((reason, offset))
    return RejectedBatch(offset, next_offset)


#: Reason and offset of the batches that were rejected since the ledger last emptied this list.
REJECTED: list[tuple[str, int]] = []


def install_safe_records() -> None:
    """Make every consumer of this process unpack with SafeRecords.

    Raises:
        ResourceError: The installed library unpacks in a way that this module does not know.
    """
    if getattr(fetcher, "MemoryRecords", None) not in (MemoryRecords, SafeRecords):
        raise ResourceError(
            f"aiokafka {version('aiokafka')} unpacks records in a way that llmops cannot bound. Install the version "
            f"that llmops requires with: {install_command('kafka')}"
        )
    fetcher.MemoryRecords = SafeRecords
