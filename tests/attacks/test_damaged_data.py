"""Damage to what others keep for us: a usage topic with wrong bytes, and a database with wrong blocks."""

import asyncio
import random
import resource
import struct
import subprocess
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from llmops.control import kafka_batches
from llmops.control.ledger import write_until_accepted
from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.usage.ledger_sink import write_events
from llmops.store.factory import open_store
from tests.attacks.harness import MIB, scaled

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def event(seq: int) -> UsageEvent:
    made = UsageEvent(str(uuid4()), "gw-1", seq, NOON, f"r-{seq}", "acme", str(UUID(int=7)), "key-a", "tiny", 37)
    return made._replace(output_tokens=7, cost_micros=3, price_id="p")


@pytest.fixture(autouse=True)
def nothing_rejected(monkeypatch):
    monkeypatch.setattr(kafka_batches, "REJECTED", [])


# -- the topic ---------------------------------------------------------------------------------------------------------


def _batch(offset: int, compressed: bool = False) -> bytearray:
    builder = DefaultRecordBatchBuilder(2, 1 if compressed else 0, 0, -1, -1, -1, 1 << 20)
    for at in range(3):
        builder.append(at, 1, b"key", b"value", [])
    made = bytearray(builder.build())
    made[:8] = struct.pack(">q", offset)
    return made


@pytest.mark.parametrize("damage", [None, "record", "checksum", "compressed"])
def test_a_damaged_batch_is_passed_over_and_the_next_is_read(damage):
    """Before the fix, the ledger fetched a damaged batch again without end."""
    first, second = _batch(10, damage == "compressed"), _batch(13)
    if damage == "record":
        first[-3] ^= 0xFF
    elif damage == "checksum":
        first[17] ^= 0xFF
    records = kafka_batches.SafeRecords(bytes(first + second))
    offsets, behind = [], []
    while records.has_next():
        batch = records.next_batch()
        assert batch.validate_crc()
        offsets += [one.offset for one in batch]
        behind.append(batch.next_offset)
    assert (behind, offsets) == ([13, 16], [*([10, 11, 12] if damage is None else []), 13, 14, 15])
    reason = {None: [], "compressed": ["compressed batch"]}.get(damage, ["damaged batch"])
    assert [one for one, _ in kafka_batches.REJECTED] == reason


def _unreadable(offset: int, kind: str) -> bytes:
    """Return a batch that the library cannot read, or that would send it to another offset."""
    if kind == "old format":
        old = LegacyRecordBatchBuilder(1, 0, 1 << 20)
        old.append(offset, 1, b"key", b"value")
        return struct.pack(">q", offset) + bytes(old.build())[8:]
    made = _batch(offset)
    records, offsets = {"more records": 2**31 - 1, "no records": -1}, {"back": -5, "far ahead": 2**31 - 1}
    for at, values in ((57, records), (23, offsets), (61, {"garbage": -1})):
        if kind in values:
            struct.pack_into(">i", made, at, values[kind])
    struct.pack_into(">I", made, 17, calc_crc32c(bytes(made[21:])))
    return bytes(made)


@pytest.mark.parametrize("kind", ["old format", "more records", "no records", "back", "far ahead", "garbage"])
def test_a_batch_that_cannot_be_read_is_passed_over(kind):
    """Before the fix, the ledger read such a batch again without end, or went on at another offset."""
    records = kafka_batches.SafeRecords(_unreadable(10, kind) + bytes(_batch(13)))
    rejected = records.next_batch()
    assert list(rejected) == []
    assert 10 < rejected.next_offset <= 13
    assert [one.offset for one in records.next_batch()] == [13, 14, 15]
    assert not records.has_next()
    assert len(kafka_batches.REJECTED) == 1


def test_no_flipped_bits_of_a_topic_end_the_reading() -> None:
    """Before the fix, the library's errors for 5 of 1,000 damaged batches came again at each start, for ever."""
    good, chosen = bytes(_batch(10) + _batch(13)), random.Random(7)
    for _ in range(scaled(3000, 100_000)):
        damaged = bytearray(good)
        for _ in range(chosen.randrange(1, 4)):
            damaged[chosen.randrange(len(damaged))] ^= 1 << chosen.randrange(8)
        records = kafka_batches.SafeRecords(bytes(damaged))
        while records.has_next():
            list(records.next_batch())


_BOUNDED = f"""
import resource, zlib
resource.setrlimit(resource.RLIMIT_AS, ({1024 * MIB}, {1024 * MIB}))
import gzip, struct
from tests.attacks.test_damaged_data import _batch, _bomb
from llmops.control import kafka_batches
records = kafka_batches.SafeRecords(_bomb({scaled(200, 2000)}) + bytes(_batch(1)))
seen = []
while records.has_next():
    seen += [one.offset for one in records.next_batch()]
assert seen == [1, 2, 3], seen
"""


def _bomb(mebibytes: int) -> bytes:
    """Return a batch with one gzipped record that unpacks to this many MiB, made without so much memory."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed = b"".join(packer.compress(b"0" * MIB) for _ in range(mebibytes)) + packer.flush()
    attributes = struct.pack(">hiqqqhii", 1, 0, 1, 1, -1, -1, -1, 1) + packed
    from aiokafka.record.util import calc_crc32c

    body = struct.pack(">ibI", 0, 2, calc_crc32c(attributes)) + attributes
    return struct.pack(">qi", 0, len(body)) + body


def test_a_bomb_does_not_end_a_process_with_a_memory_limit():
    """Control has a limit of 1 GiB in the chart. On the tree before, a record of 700 MiB took 1,470 MB."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _BOUNDED], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 1024 * MIB


# -- the database ------------------------------------------------------------------------------------------------------


async def test_a_damaged_table_holds_the_ledger_up_and_loses_no_event(own_postgres, caplog):
    """Wrong blocks are no fault of an event: nothing is parked, and the ledger goes on once the table is mended."""
    url, stop, start = own_postgres
    async with await open_store(url) as store:
        await write_until_accepted(store, [event(seq) for seq in range(5)])
        connection = await asyncpg.connect(url)
        path = await connection.fetchval("SELECT pg_relation_filepath('gateways')")
        data = Path(await connection.fetchval("SHOW data_directory"))
        await connection.execute("CHECKPOINT")
        await connection.close()
        block = data / path
        whole = block.read_bytes()
        stop()
        block.write_bytes(b"\xa5" * len(whole))
        start()
        waiting = asyncio.create_task(write_until_accepted(store, [event(seq) for seq in range(5, 10)]))
        while "has damaged data" not in caplog.text:
            await asyncio.sleep(0.05)
            assert not waiting.done()
        stop()
        block.write_bytes(whole)
        start()
        await asyncio.wait_for(waiting, 60)
        async with store.read() as reading:
            await reading.run_sync(lambda sync: write_events(sync, []))
        connection = await asyncpg.connect(url)
        assert await connection.fetchval("SELECT count(*) FROM usage_records") == 10
        assert await connection.fetchval("SELECT count(*) FROM dead_letters") == 0
        await connection.close()
