"""What the consumer unpacks of a topic: batches that are not compressed and not damaged.

A batch of a few hundred kilobytes can unpack to gigabytes, and the client library unpacks it whole, on the event loop,
before anybody can look at its records. Gateways do not compress, so a batch that is compressed is passed over, and so
is a batch whose checksum is wrong, which the library would ask for again without end. A gateway sends again what is
not confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords

from llmops.distribution import install_command
from llmops.errors import ResourceError

COMPRESSED, DAMAGED = "compressed batch", "damaged batch"


class RejectedBatch:
    """A batch without records, in place of one that is not unpacked."""

    producer_id = -1
    is_control_batch = is_transactional = False

    def __init__(self, batch: DefaultRecordBatch, reason: str) -> None:
        self.reason = reason
        self.base_offset, self.next_offset = batch.base_offset, batch.next_offset

    def validate_crc(self) -> bool:
        """The checksum of the batch is not asked for again."""
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SafeRecords:
    """The batches of one partition in the answer to one fetch request, in place of the library's `MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._records = MemoryRecords(data)

    def has_next(self) -> bool:
        """Return True if there is another whole batch."""
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        """Return the next batch, or a `RejectedBatch` in its place."""
        batch = self._records.next_batch()
        if not isinstance(batch, DefaultRecordBatch):
            # formats before Kafka 0.11, which our gateways do not write
            raise CorruptRecordException("a batch in a format before version 2")
        reason = COMPRESSED if batch.compression_type else "" if batch.validate_crc() else DAMAGED
        if not reason:
            return batch
        REJECTED.append((reason, batch.base_offset))
        return RejectedBatch(batch, reason)

    def size_in_bytes(self) -> int:
        """Return the size of the answer's part, whole batches or not."""
        return int(self._records.size_in_bytes())


#: The batches that were refused since the ledger looked: reason and offset. The ledger empties it.
REJECTED: list[tuple[str, int]] = []


def install_safe_records() -> None:
    """Have every consumer of this process unpack through `SafeRecords`.

    Raises:
        ResourceError: The library unpacks in another way than the version that llmops asks for.
    """
    if getattr(fetcher, "MemoryRecords", None) not in (MemoryRecords, SafeRecords):
        raise ResourceError(
            f"aiokafka {version('aiokafka')} unpacks records in a way that llmops cannot bound; install the version "
            f"that llmops asks for with: {install_command('kafka')}"
        )
    fetcher.MemoryRecords = SafeRecords
