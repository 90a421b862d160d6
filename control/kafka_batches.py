"""Safe unpacking of Kafka batches.

Compressed and damaged batches are rejected before the client library unpacks them.

A batch of a few hundred kilobytes can unpack to gigabytes, and the library unpacks it whole, on the
event loop, before its records can be checked. Gateways do not compress, so a compressed batch is
skipped. A batch with a wrong checksum is skipped too, because the library would fetch it again
forever. Gateways resend what was not confirmed.
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

#: Reasons for rejecting a batch, as dead letters have them.
COMPRESSED = "compressed batch"
DAMAGED = "damaged batch"


class RejectedBatch:
    """An empty batch in place of a rejected one."""

    producer_id = -1
    is_control_batch = is_transactional = False

    def __init__(self, batch: DefaultRecordBatch, reason: str) -> None:
        self.reason = reason
        self.base_offset, self.next_offset = batch.base_offset, batch.next_offset

    def validate_crc(self) -> bool:
        """Return True: the checksum was checked already."""
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SafeRecords:
    """The batches of one partition in the response to a fetch.

    This class takes the place of the library's `MemoryRecords`.
    """

    def __init__(self, data: bytes) -> None:
        self._records = MemoryRecords(data)

    def has_next(self) -> bool:
        """Return True if there is another whole batch."""
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        """Return the next batch, or a RejectedBatch in its place."""
        batch = self._records.next_batch()
        if not isinstance(batch, DefaultRecordBatch):
            # formats before Kafka 0.11, which gateways do not write
            raise CorruptRecordException("a batch in a format before version 2")
        reason = COMPRESSED if batch.compression_type else "" if batch.validate_crc() else DAMAGED
        if not reason:
            return batch
        REJECTED.append((reason, batch.base_offset))
        return RejectedBatch(batch, reason)

    def size_in_bytes(self) -> int:
        """Return the bytes of the partition in the response, including an incomplete last batch."""
        return int(self._records.size_in_bytes())


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
