"""Files of a gateway that died, damaged in every way: the next gateway starts, and no bill is lost without a word."""

import asyncio
import contextlib
import logging
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmops.errors import InputError, ResourceError
from llmops.gateway.settings import UsageSettings
from llmops.gateway.usage.event_formats import encode_event, new_event_id
from llmops.gateway.usage.ledger_sink import LedgerSink
from llmops.gateway.usage.open_answers import MARK, SLOT_BYTES, TOKENS, OpenAnswers
from llmops.gateway.usage.outbox import ANSWERS_COUNT, ANSWERS_MARK, UsageOutbox
from llmops.gateway.usage.outbox_writer import OutboxWriter
from llmops.gateway.usage.sink import NoPrices
from llmops.gateway.usage.usage_check import UsageCheck
from llmops.store.factory import open_store
from llmops.store.ledger_mark import is_older_than_log
from tests.attacks.harness import MIB, record, scaled
from tests.gateway.test_endings import Kept
from tests.gateway.test_usage_outbox import ask, event
from tests.support.waiting import eventually

EVENTS, ENDED, OPEN_ANSWERS = 200, 2, 5
SLOTS = ENDED + OPEN_ANSWERS


def a_dead_gateway(root: Path) -> Path:
    """Leave a folder with events that no ledger has, half of them in the log, and with slots that are in use."""
    folder = root / "gw-000000000000"
    folder.mkdir(parents=True)
    outbox, answers = UsageOutbox(folder), OpenAnswers(folder / "open-answers")
    outbox.add([encode_event(event(seq)) for seq in range(EVENTS // 2)])
    asyncio.run(outbox.checkpoint())
    outbox.add([encode_event(event(seq)) for seq in range(EVENTS // 2, EVENTS)])
    for at in range(SLOTS):
        slot = answers.take()
        assert slot is not None
        slot.open(new_event_id(), 1_790_000_000_000_000, 10, ["tiny", f"answer-{at}", "acme", "user", "key", "pro"])
        slot.numbers[TOKENS] = 100 + at
        if at >= OPEN_ANSWERS:
            slot.end(encode_event(event(EVENTS + at)))
    answers.header[MARK] = 7
    outbox.answers[ANSWERS_MARK], outbox.answers[ANSWERS_COUNT] = 7, SLOTS
    # As a process that is killed leaves them: closing a database empties its log.
    killed = content(folder)
    outbox.close()
    answers.close()
    restore(folder, killed)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of each file that a process leaves when it is killed."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}


def restore(folder: Path, files: dict[str, bytes]) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a gateway that died."""
    return a_dead_gateway(tmp_path / "usage")


async def taken_up(root: Path) -> Kept:
    """Start a gateway's usage on `root`, and return what its ledger has when all is delivered."""
    ledger = Kept()
    check = UsageCheck(root, UsageSettings(), ledger, NoPrices())
    await check.start()
    assert check.worker is not None
    while set(root.glob("gw-*")) != {check.worker.lock.folder}:
        await asyncio.sleep(0.002)
    await check.close()
    return ledger


def flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 20)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def torn_slot(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(SLOTS) * SLOT_BYTES
    return data[:at] + chance.randbytes(SLOT_BYTES) + data[at + SLOT_BYTES :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits": flip,
    "half": lambda data, chance: data[: chance.randrange(len(data))],
    "empty": lambda data, chance: b"",
    "random": lambda data, chance: chance.randbytes(len(data)),
    "torn slot": torn_slot,
}


FILES = ["open-answers", "outbox.db", "outbox.db-wal", "position", "lock"]


def check_damage(damages: dict[str, str], seed: int) -> None:
    """Damage these files, and check that all is billed that other files have, and that a loss is in the log."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "usage"
        dead, chance = a_dead_gateway(root), random.Random(seed)
        for name, damage in damages.items():
            data = (dead / name).read_bytes() if (dead / name).exists() else b""
            (dead / name).write_bytes(DAMAGES[damage](data or b"x", chance))
        listener = Mock(spec=logging.Handler, level=logging.ERROR)
        logging.getLogger("llmops").addHandler(listener)
        try:
            ledger = asyncio.run(taken_up(root))
        finally:
            logging.getLogger("llmops").removeHandler(listener)
        said = [one.getMessage() for (one,), _ in listener.handle.call_args_list]
        lost = [one for one in ledger.events.values() if one.finish_reason == "gateway_lost"]
        used = [one for one in ledger.events.values() if one.finish_reason != "gateway_lost"]
        kept, ended = ([one for one in used if (one.seq >= EVENTS) == is_end] for is_end in (False, True))
        # Nothing is billed that was not used.
        assert all(one == event(one.seq) for one in used)
        if not any(file.startswith("outbox") for file in damages):
            assert len(kept) == EVENTS
        elif len(kept) < EVENTS:
            assert said
        if "open-answers" not in damages:
            assert ({one.output_tokens for one in lost}, len(ended)) == (set(range(100, 100 + OPEN_ANSWERS)), ENDED)
        elif len(lost) + len(ended) < SLOTS:
            assert any("damaged" in text or "is not as that gateway left it" in text for text in said), said


@pytest.mark.parametrize("file", FILES)
@given(damage=st.sampled_from(sorted(DAMAGES)), seed=st.integers(0, 2**32))
@settings(max_examples=scaled(10, 100), deadline=None)
def test_a_damaged_file(file: str, damage: str, seed: int) -> None:
    """The gateway starts, what the other files have is billed, and a loss is an error in the log."""
    check_damage({file: damage}, seed)


@given(st.dictionaries(st.sampled_from(FILES), st.sampled_from(sorted(DAMAGES)), min_size=2), st.integers(0, 2**32))
@example({"outbox.db-wal": "empty", "position": "empty"}, 0)
@settings(max_examples=scaled(20, 300), deadline=None)
def test_several_damaged_files(damages: dict[str, str], seed: int) -> None:
    """Before the fix, an outbox without its log and its position lost 100 of 200 events without a word."""
    check_damage(damages, seed)


def test_a_damaged_first_slot_is_no_count_of_lost_events(folder: Path, caplog) -> None:
    """Before the fix, two billions of events were reported as lost, and the last event got their number."""
    slots = folder / "open-answers"
    slots.write_bytes(random.Random(1).randbytes(SLOT_BYTES) + slots.read_bytes()[SLOT_BYTES:])
    ledger = asyncio.run(taken_up(folder.parent))
    assert max(one.seq for one in ledger.events.values()) == EVENTS + SLOTS - 1
    assert "are lost with the gateway" not in caplog.text
    assert "their records are damaged" in caplog.text


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("open-answers", "8 requests ran when a gateway died, but the file"),
        ("another's open-answers", "and has records of 1."),
        ("outbox.db", "is damaged"),
        ("outbox.db-wal", "is lost: up to 5 usage events"),
        ("position", ""),
    ],
)
async def test_an_older_file(tmp_path: Path, file: str, said: str, caplog) -> None:
    """Before the fix, an older file lost 6 of 8 open answers, all 44 events, or 4 of them, without a word."""
    folder = tmp_path / "gw-000000000000"
    folder.mkdir()
    outbox = UsageOutbox(folder)
    writer = OutboxWriter(folder, outbox, NoPrices())
    for tokens in range(1, 41):
        ask(writer, tokens)
    for tokens in (101, 102):
        ask(writer, tokens, end=False)
    writer.flush()
    older = content(folder)
    await outbox.checkpoint()
    for tokens in range(41, 46):
        ask(writer, tokens)
    for tokens in range(103, 109):
        ask(writer, tokens, end=False)
    for _ in range(30):
        writer.flush()
    # The ledger may confirm the last event first.
    outbox.delete([outbox.last_place])
    killed = content(folder)
    outbox.close()
    (tmp_path / "other").mkdir()
    other = UsageOutbox(tmp_path / "other")
    ask(OutboxWriter(tmp_path / "other", other, NoPrices()), 1000, end=False)
    older["another's open-answers"] = (tmp_path / "other" / "open-answers").read_bytes()
    other.close()
    restore(folder, killed | {file.removeprefix("another's "): older[file]})
    ledger = await taken_up(tmp_path)
    billed = [one for one in ledger.events.values() if one.output_tokens < 1000]
    errors = "\n".join(one.getMessage() for one in caplog.records if one.levelname == "ERROR")
    assert said in errors
    assert (len(billed) < 52) is bool(errors)


def a_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path)


def a_terabyte(path: Path) -> None:
    os.truncate(path, 2**40)


@pytest.mark.parametrize("put", [a_pipe, a_loop, a_terabyte, Path.mkdir])
async def test_a_file_that_is_no_file(folder, put: Callable[[Path], None]) -> None:
    """Set aside whatever stands in the place of a file, and bill the events beside it.

    Before the fix, a pipe held the delivery of all outboxes for ever, without a line in the log.
    """
    if put is not a_terabyte:
        (folder / "open-answers").unlink()
    put(folder / "open-answers")
    ledger = await asyncio.wait_for(taken_up(folder.parent), 60)
    assert len([one for one in ledger.events.values() if one.seq < EVENTS and one.gateway_id == "gw-1"]) == EVENTS
    if put is not a_terabyte:
        (aside,) = folder.parent.glob("damaged-*")
        assert (aside / "outbox.db").stat().st_size > 0
    record("the gateway starts beside every damaged file; before, a torn slot stopped each start")


@pytest.mark.parametrize("name", ["outbox.db-shm", "outbox.db-wal", "outbox.db-journal"])
@pytest.mark.parametrize("put", [a_pipe, a_loop, Path.mkdir])
async def test_a_file_of_sqlite_that_is_no_file(folder, name: str, put: Callable[[Path], None], caplog) -> None:
    """Bill what the other files have.

    Before the fix, a pipe as `-shm` lost all 200 events, a pipe as `-journal` held the delivery of all outboxes for
    ever, and a folder or link kept this one from being billed.
    """
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    ledger = await asyncio.wait_for(taken_up(folder.parent), 60)
    billed = [one for one in ledger.events.values() if one.seq < EVENTS and one.gateway_id == "gw-1"]
    # the second half stood in the log
    assert len(billed) == (EVENTS // 2 if name.endswith("wal") else EVENTS)
    assert "is not a regular file; it was moved to" in caplog.text
    assert ("is lost: up to 100 usage events" in caplog.text) is name.endswith("wal")


@pytest.mark.parametrize("put", [a_pipe, a_loop, Path.mkdir])
async def test_a_database_that_is_no_file(folder, put: Callable[[Path], None], caplog) -> None:
    """Bill the open answers beside it.

    Before the fix, a folder or a link to itself kept them from being billed, and the gateway tried again for ever.
    """
    (folder / "outbox.db").unlink()
    put(folder / "outbox.db")
    ledger = await asyncio.wait_for(taken_up(folder.parent), 60)
    assert len(ledger.events) == SLOTS
    assert "outbox.db is not a regular file; it was moved to" in caplog.text
    assert "usage events" in caplog.text


async def test_a_log_of_a_terabyte_fills_no_disk(folder) -> None:
    """Before the fix, the copy of a damaged log with a hole took 16 GB in a minute, until the disk was full."""
    (folder / "outbox.db-wal").write_bytes(b"")
    a_terabyte(folder / "outbox.db-wal")
    await asyncio.wait_for(taken_up(folder.parent), 60)
    (kept,) = folder.parent.glob("damaged-*-outbox.db-wal-*")
    assert kept.stat().st_size <= 64 * MIB


@pytest.mark.parametrize("name", ["store.db", "store.db-shm", "store.db-wal", "store.db-journal"])
async def test_a_store_with_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    """Before the fix, opening a store with a pipe as `-journal` never ended."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="move it away"):
        await open_store(f"sqlite:///{tmp_path}/store.db")


@pytest.mark.parametrize("put", [Path.touch, os.mkfifo, lambda path: (path / "lock").mkdir(parents=True)])
async def test_a_folder_that_is_no_outbox_keeps_no_other_from_being_billed(folder, put, caplog) -> None:
    """Before the fix, one stray file in the folder of outboxes kept all dead gateways' events from being billed."""
    put(folder.parent / "gw-000")
    sink = Kept()
    check = UsageCheck(folder.parent, UsageSettings(), sink, NoPrices())
    await check.start()
    async with asyncio.timeout(60):
        while folder.exists():
            await asyncio.sleep(0.01)
    await check.close()
    assert len(sink.events) == EVENTS + SLOTS
    assert "gw-000 is not an outbox that can be opened" in caplog.text


@pytest.mark.parametrize("lost", [0, 3])
async def test_an_outbox_that_is_removed_under_its_gateway_ends_with_a_sentence(tmp_path, lost, caplog, monkeypatch):
    monkeypatch.setattr("llmops.gateway.usage.usage_check.DRAIN_TIMEOUT", 0.1)
    monkeypatch.setattr("llmops.gateway.usage.usage_check.CHECKPOINT_INTERVAL", 0.05)
    ledger = Kept()
    monkeypatch.setattr(ledger, "confirmed", AsyncMock(return_value=frozenset()))
    check = UsageCheck(tmp_path, UsageSettings(), ledger, NoPrices())
    await check.start()
    assert check.worker is not None
    check.worker.outbox.add([encode_event(event(seq)) for seq in range(lost)])
    shutil.rmtree(check.worker.lock.folder)
    await eventually(lambda: "while the gateway uses it" in caplog.text, seconds=10)
    await check.close()
    soon, told = [one.getMessage() for one in caplog.records if str(check.worker.lock.folder) in one.getMessage()]
    # before the fix, this spoke of a power failure, and a killed gateway was enough
    assert "was removed while the gateway uses it. Usage is delivered as long as the gateway runs" in soon
    assert f"was removed while the gateway used it. {lost} usage events" in told


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "store.db.ledger", "none"])
@pytest.mark.parametrize("is_written_back", [True, False])
async def test_an_older_file_of_a_store(tmp_path: Path, name: str, is_written_back: bool, caplog) -> None:
    """Before the fix, a start on an older file or log lost half of the bills without a word.

    An older file beside a newer log, which would damage it, is refused.
    """
    sink = LedgerSink(f"sqlite:///{tmp_path}/store.db")
    written = [event(seq) for seq in range(20)]
    await sink.write(written[:5])
    await sink.write(written[5:10])
    older = content(tmp_path)
    await sink.write(written[10:15])
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as store:
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        await sink.write(written[15:])
        if is_written_back:
            store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        killed = content(tmp_path)
    await sink.close()
    restore(tmp_path, killed | ({name: older[name]} if name in older else {}))
    for _ in range(2):
        sink = LedgerSink(f"sqlite:///{tmp_path}/store.db")
        try:
            known = await sink.confirmed([one.id for one in written])
        except ResourceError as error:
            is_refused = "beside the write-ahead log of the old file" in error.message
            assert (name, is_written_back, is_refused) == ("store.db", False, True)
            return
        finally:
            await sink.close()
    is_lost = len(known) < len(written)
    assert caplog.text.count("is older than the last usage that was written to it") == is_lost
    assert is_lost is (name in ("store.db", "store.db-wal"))


def test_the_look_at_a_store_keeps_the_locks_of_its_connections(tmp_path: Path) -> None:
    """A process that closes a file loses all of its locks on the file, and another would delete the log."""
    file = tmp_path / "store.db"

    def locks() -> list[str]:
        inode = f":{file.stat().st_ino} "
        return [line for line in Path("/proc/locks").read_text().splitlines() if inode in line]

    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as store:
        for statement in ("journal_mode = WAL", "user_version = 1", "user_version = 2"):
            store.execute(f"PRAGMA {statement}").fetchall()
        before = locks()
        assert before
        assert not is_older_than_log(file, tmp_path / "store.db-wal")
        assert locks() == before


async def test_damage_writes_few_lines_and_keeps_the_log(folder, tmp_path, caplog) -> None:
    """Before the fix, 99,901 damaged rows wrote as many lines, and a damaged log of SQLite was deleted."""
    with contextlib.closing(sqlite3.connect(folder / "outbox.db")) as outbox:
        outbox.execute("UPDATE events SET body = x'00' WHERE place % 2")
        outbox.commit()
    await taken_up(folder.parent)
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) < 15
    folder = await asyncio.to_thread(a_dead_gateway, tmp_path / "second")
    log = folder / "outbox.db-wal"
    os.truncate(log, whole := log.stat().st_size // 2)
    caplog.clear()
    await taken_up(tmp_path / "second")
    assert "Its log is kept in" in caplog.text
    (kept,) = (tmp_path / "second").glob("damaged-*-outbox.db-wal-*")
    assert kept.stat().st_size == whole


async def test_a_store_whose_file_is_replaced_keeps_every_later_event(tmp_path: Path, caplog) -> None:
    """Before the fix, a gateway went on with the old file, which confirmed its events: none of them was billed."""
    file, copy = tmp_path / "store.db", tmp_path / "copy.db"
    sink = LedgerSink(f"sqlite:///{file}")
    await sink.write([event(0)])
    with contextlib.closing(sqlite3.connect(file)) as store, contextlib.closing(sqlite3.connect(copy)) as backup:
        store.backup(backup)
    await sink.write([event(1)])
    for kind in ("", "-wal", "-shm"):
        Path(f"{file}{kind}").unlink()
    with pytest.raises(ResourceError, match="cannot be found"):
        await sink.write([event(2)])
    shutil.copy(copy, file)
    later = [event(seq) for seq in range(2, 22)]
    await sink.write(later)
    assert len(await sink.confirmed([one.id for one in later])) == len(later)
    assert not await sink.confirmed([event(1).id])
    with contextlib.closing(sqlite3.connect(file)) as store:
        assert store.execute("SELECT count(*) FROM usage_records").fetchone() == (21,)
    assert caplog.text.count("was replaced by another file") == 1
    copy.rename(file)
    with pytest.raises(ResourceError, match=r"remove .*-wal and .*-shm"):
        await sink.write([event(22)])
    for seq in (22, 23):
        # The second time, the connection that the first one opened loses its log.
        for kind in ("-wal", "-shm"):
            Path(f"{file}{kind}").unlink()
        await sink.write([event(seq)])
    with contextlib.closing(sqlite3.connect(file)) as store:
        assert store.execute("SELECT count(*) FROM usage_records").fetchone() == (3,)
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    await sink.close()
