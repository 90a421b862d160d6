"""The outbox and the slots of open answers, torn, full and killed: each event is delivered once."""

import asyncio
import resource
import shutil
import sqlite3
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from unittest.mock import AsyncMock, Mock
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome, Usage, UsageEvent
from llmops.gateway.settings import GatewaySettings, UsageSettings
from llmops.gateway.usage.delivery import BATCH_SIZE, UsageDelivery
from llmops.gateway.usage.event_formats import decode_event, encode_event, from_cloud_event, to_cloud_event
from llmops.gateway.usage.open_answers import read_slots
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.outbox_folders import FolderLock, lock_abandoned_folders, lock_new_folder
from llmops.gateway.usage.outbox_writer import OutboxWriter, recover_open_answers
from llmops.gateway.usage.sink import NoPrices, UsageSink
from llmops.gateway.usage.usage_check import UsageCheck, create_usage_check
from tests.support.waiting import eventually

NOON = datetime(2026, 11, 22, 12, 0, 0, 123456, tzinfo=UTC)
ANN = Caller("acme", str(UUID(int=7)), "key-a", tier="pro")


def event(seq: int, gateway: str = "gw-1", **changes) -> UsageEvent:
    ids = (str(UUID(int=1000 + seq)), gateway, seq, NOON, f"chatcmpl-{seq}")
    made = UsageEvent(*ids, ANN.tenant_id, ANN.user_id, ANN.key_id, "smollm2", 37)
    return made._replace(output_tokens=seq, **changes)


def add(outbox: UsageOutbox, seqs, **changes) -> None:
    outbox.add([encode_event(event(seq, **changes)) for seq in seqs])


async def all_of(outbox: UsageOutbox) -> list[UsageEvent]:
    return [row.event for row in await outbox.read(0, 10**6)]


texts = st.text(max_size=40)
counts = st.integers(0, 2**31)
# the times and costs that a bill takes; tests/attacks/test_usage_topic.py has the others
moments = st.datetimes(datetime(1971, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC))
events = st.builds(
    UsageEvent, st.uuids().map(str), st.just("gw-1"), counts, moments, texts, texts, texts, texts, texts,
    counts, counts, counts, counts, st.integers(0, 10**12), st.none() | texts,
    st.integers(0, 599), st.none() | texts, st.none() | counts, st.none() | counts,
    migrations=st.integers(0, 2**15 - 1),
)  # fmt: skip


@given(events)
def test_an_event_survives_both_of_its_forms(one):
    assert decode_event(encode_event(one)) == from_cloud_event(to_cloud_event(one)) == one


def test_a_cloud_event_is_what_others_read():
    """Field by field as CloudEvents 1.0 and docs/accounts.md have it."""
    sent = event(1841)._replace(cached_tokens=32, cost_micros=12, price_id="p", finish_reason="stop", ttft_ms=41)
    assert to_cloud_event(sent).decode() == (
        '{"specversion":"1.0","id":"00000000-0000-0000-0000-000000000b19","source":"gateway/gw-1",'
        '"type":"llmops.usage.v1","time":"2026-11-22T12:00:00.123456Z","subject":"acme",'
        '"datacontenttype":"application/json","data":{"seq":1841,"request_id":"chatcmpl-1841",'
        '"user_id":"00000000-0000-0000-0000-000000000007","key_id":"key-a","model":"smollm2","input_tokens":37,'
        '"cached_tokens":32,"output_tokens":1841,"reasoning_tokens":0,"cost_micros":12,"price_id":"p","status":200,'
        '"finish_reason":"stop","ttft_ms":41,"latency_ms":null,"priority":null,"version":null,"replica":null,'
        '"migrations":0}}'
    )


# -- the outbox ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "checkpoint", "delete", "reopen"]), st.integers(0, 9))))
def test_an_outbox_is_what_was_added_less_what_was_deleted(steps):
    async def run(folder: Path) -> None:
        outbox, expected, count = UsageOutbox(folder), {}, 0
        for step, number in steps:
            if step == "add":
                add(outbox, range(count, count + number))
                expected |= {seq + 1: event(seq) for seq in range(count, count + number)}
                count += number
            elif step == "delete" and expected:
                places = list(expected)[::3]
                outbox.delete(places)
                expected = {place: one for place, one in expected.items() if place not in places}
            elif step == "checkpoint":
                await outbox.checkpoint()
            elif step == "reopen":
                outbox.close()
                outbox = UsageOutbox(folder)
            assert (dict(await outbox.read(0, 1000)), outbox.count) == (expected, len(expected))
        outbox.close()

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


async def test_a_damaged_row_is_reported_and_holds_up_no_other(tmp_path, caplog):
    outbox = UsageOutbox(tmp_path)
    add(outbox, range(10))
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as other, other:
        other.execute("UPDATE events SET body = cast(replace(body, '37', '38') AS BLOB) WHERE place IN (1, 2, 7)")
    assert [row.place for row in await outbox.read(0, 2)] == [3, 4]
    assert [row.place for row in await outbox.read(4, 10)] == [5, 6, 8, 9, 10]
    assert list((await outbox.ids(10, 2)).values()) == [3, 4]
    assert (outbox.damaged, caplog.text.count("is damaged")) == ({1, 2, 7}, 3)
    outbox.close()


async def test_a_lost_end_of_the_log_is_reported(tmp_path, caplog):
    """SQLite ends a log silently at the first frame that is not whole."""
    outbox = UsageOutbox(tmp_path)
    add(outbox, range(5))
    await outbox.checkpoint()
    whole = {path: path.read_bytes() for path in tmp_path.glob("outbox.db*")}
    add(outbox, range(5, 8))
    outbox.close()
    for path, data in whole.items():
        path.write_bytes(data)
    again = UsageOutbox(tmp_path)
    assert [one.seq for one in await all_of(again)] == list(range(5))
    assert "up to 3 usage events are missing" in caplog.text
    # The places of the lost events are not used again.
    assert again.last_place == 8
    again.close()


async def test_a_lost_log_beside_a_lost_position_is_reported(tmp_path, caplog):
    """Before the fix, the outbox was taken for a whole one."""
    outbox = UsageOutbox(tmp_path)
    add(outbox, range(4))
    add(outbox, [4])
    await outbox.checkpoint()
    whole = (tmp_path / "outbox.db").read_bytes()
    add(outbox, range(5, 8))
    outbox.close()
    (tmp_path / "outbox.db").write_bytes(whole)
    (tmp_path / "position").unlink()
    UsageOutbox(tmp_path).close()
    assert "cannot tell whether usage events are missing" in caplog.text


@pytest.mark.parametrize("undelivered", [0, 2])
async def test_events_that_were_delivered_are_not_reported_as_lost(tmp_path, undelivered, caplog):
    """Before the fix, a log that ended too early in an empty outbox counted all events of its process as lost."""
    outbox = UsageOutbox(tmp_path)
    add(outbox, range(100))
    outbox.delete(range(1, 101))
    await outbox.checkpoint()
    whole = {path: path.read_bytes() for path in tmp_path.glob("outbox.db*")}
    add(outbox, range(100, 103))
    outbox.delete(range(101, 104 - undelivered))
    outbox.close()
    for path, data in whole.items():
        path.write_bytes(data)
    UsageOutbox(tmp_path).close()
    assert ("up to 2 usage events are missing" in caplog.text) is bool(caplog.messages) is bool(undelivered)


async def test_an_outbox_is_small_again_after_an_outage(tmp_path):
    outbox = UsageOutbox(tmp_path)
    add(outbox, range(20_000))
    await outbox.checkpoint()
    assert (tmp_path / "outbox.db").stat().st_size > 5 * 2**20
    outbox.delete(range(1, 20_001))
    assert outbox.size < 50_000
    for _ in range(2):
        await outbox.checkpoint()
    assert (tmp_path / "outbox.db").stat().st_size < 50_000
    add(outbox, [20_000])
    assert [row.place for row in await outbox.read(0, 10)] == [20_001]
    outbox.close()


# -- no room ---------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(size: int):
    """Prevent files from growing beyond `size` bytes.

    The system writes what fits, and then fails.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_loses_nothing_and_says_so(tmp_path):
    outbox = UsageOutbox(tmp_path)
    writer = OutboxWriter(tmp_path, outbox, NoPrices())
    ask(writer, 1)
    writer.flush()
    with full_disk((tmp_path / "outbox.db-wal").stat().st_size + 10):
        ask(writer, 2)
        ask(writer, 3)
        writer.flush()
        assert writer.trouble
        assert outbox.count == 1
        # a process that is killed now leaves them in its slots
        assert sorted(decode_event(one).output_tokens for one in slots(tmp_path).ended) == [2, 3]
        writer.flush()
        assert writer.trouble
    writer.flush()
    assert (writer.trouble, [one.output_tokens for one in await all_of(outbox)]) == ("", [1, 2, 3])
    assert slots(tmp_path)[:3] == ([], [], 0)


async def test_an_outbox_that_is_not_emptied_is_bounded(tmp_path):
    outbox = UsageOutbox(tmp_path, max_bytes=2**17)
    writer = OutboxWriter(tmp_path, outbox, NoPrices())
    count = 0
    while not writer.trouble:
        count += 1
        ask(writer, count)
        writer.flush()
    assert 2**16 < outbox.size <= 2**17
    assert "full" in writer.trouble
    for tokens in range(count + 1, count + 40):
        ask(writer, tokens)
    had: list[int] = []
    while writer.trouble:
        rows = await outbox.read(0, 10**6)
        had += [row.event.output_tokens for row in rows]
        outbox.delete([row.place for row in rows])
        writer.flush()
    had += [one.output_tokens for one in await all_of(outbox)]
    assert had == list(range(1, count + 40))


def ask(writer: OutboxWriter, tokens: int, end: bool = True, seconds: float = 0.0) -> None:
    arrived = datetime.now(UTC) - timedelta(seconds=seconds)
    context = RequestContext("req_1", caller=ANN, started=perf_counter() - seconds, arrived=arrived)
    recorder = writer.recorder(context)
    recorder.begin("smollm2", f"chatcmpl-{tokens}", 37)
    recorder.count(tokens)
    if end:
        recorder.end(Outcome(200, "stop", Usage(37, tokens)), context.started)
        recorder.end(Outcome(0, "cancelled", Usage(37, 0)))


def slots(folder: Path):
    return read_slots(folder / "open-answers")


# -- what a process that dies leaves ---------------------------------------------------------------------------------


async def recovered(folder: Path) -> list[UsageEvent]:
    """Return the events of a folder whose process died."""
    outbox = UsageOutbox(folder)
    recover_open_answers(folder, outbox, NoPrices())
    events = await all_of(outbox)
    outbox.close()
    return events


async def test_open_answers_of_a_gateway_that_died_become_events(tmp_path):
    folder = tmp_path / "gw-1"
    folder.mkdir()
    writer = OutboxWriter(folder, UsageOutbox(folder), NoPrices())
    ask(writer, 4)
    writer.flush()
    # This one has ended and is not in the outbox yet.
    ask(writer, 5)
    for tokens in (7, 0, 9):
        ask(writer, tokens, end=False)
    flushed, ended, *lost = await recovered(folder)
    told = [(one.output_tokens, one.finish_reason, one.seq) for one in (flushed, ended)]
    assert (told, sorted(one.output_tokens for one in lost)) == ([(4, "stop", 0), (5, "stop", 1)], [7, 9])
    told = {(one.status, one.finish_reason, one.tenant_id, one.key_id, one.model, one.priority) for one in lost}
    assert told == {(0, "gateway_lost", "acme", "key-a", "smollm2", "pro")}
    assert {one.request_id for one in lost} == {"chatcmpl-7", "chatcmpl-9"}
    # Their numbers are of a new gateway id: the dead one may have used them for events that are lost.
    (identity,) = {one.gateway_id for one in lost}
    assert identity != folder.name
    assert [one.seq for one in lost] == [0, 1]
    # once, however often it is looked at
    assert len(await recovered(folder)) == 4


async def test_killed_between_the_outbox_and_the_slots(tmp_path):
    """The events are in the outbox, and their slots still in use: they must not come twice."""
    writer = OutboxWriter(tmp_path, UsageOutbox(tmp_path), NoPrices())
    writer.release = lambda slot: None
    ask(writer, 5)
    writer.flush()
    assert (len(slots(tmp_path).ended), [one.finish_reason for one in await recovered(tmp_path)]) == (1, ["stop"])


async def test_killed_while_open_answers_are_recovered(tmp_path, monkeypatch):
    """The events are in the outbox, and the slots still there: the next process adds nothing."""
    writer = OutboxWriter(tmp_path, UsageOutbox(tmp_path), NoPrices())
    ask(writer, 5)
    ask(writer, 7, end=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok: None)
        first = await recovered(tmp_path)
    assert (await recovered(tmp_path), len(first)) == (first, 2)


async def test_a_price_that_changes_during_an_answer_does_not_change_its_cost(tmp_path):
    """Before the fix, an answer that a budget of $0.05 allowed by the old price cost $5 by the new one."""

    class Prices(NoPrices):
        def bill(self, model, usage, at):
            return usage.completion_tokens * (100 if datetime.now(UTC) - at < timedelta(seconds=10) else 1), "p"

    outbox = UsageOutbox(tmp_path)
    writer = OutboxWriter(tmp_path, outbox, Prices())
    ask(writer, 5, seconds=20)
    writer.flush()
    assert [one.cost_micros for one in await all_of(outbox)] == [5]


def test_a_folder_is_one_processes(tmp_path):
    root = tmp_path / "usage"
    first, second = lock_new_folder(root), lock_new_folder(root)
    assert first.folder != second.folder
    assert list(lock_abandoned_folders(root)) == []
    first.release()
    (third,) = lock_abandoned_folders(root)
    assert third.folder == first.folder
    third.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


# -- delivery --------------------------------------------------------------------------------------------------------


class Ledger(UsageSink):
    """A ledger in memory. `lose`: numbers that are accepted and forgotten, as by a broker that is killed."""

    def __init__(self) -> None:
        self.had: list[int] = []
        self.ids: set[str] = set()
        self.lose: set[int] = set()
        self.away = False

    async def write(self, events) -> None:
        if self.away:
            raise UnavailableError("away")
        kept = [one for one in events if one.seq not in self.lose]
        self.had += [one.seq for one in kept]
        self.ids |= {one.id for one in kept}
        self.lose -= {one.seq for one in events}

    async def confirmed(self, ids) -> frozenset[str]:
        return frozenset(ids) & self.ids

    async def next_number(self, gateway_id: str) -> int:
        return max(self.had, default=-1) + 1 if gateway_id == "gw-1" else 0


class Delivering:
    """A delivery that is driven by hand, with a clock that is set by hand."""

    def __init__(self, folder: Path, count: int) -> None:
        self.outbox, self.ledger, self.now = UsageOutbox(folder), Ledger(), 0.0
        self.delivery = UsageDelivery(self.outbox, self.ledger, resend_timeout=10, clock=lambda: self.now)
        add(self.outbox, range(count))

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await self.delivery.deliver()


async def test_events_are_delivered_in_batches_and_deleted(tmp_path):
    one = Delivering(tmp_path, 3 * BATCH_SIZE)
    await one.turns(3)
    assert one.ledger.had == list(range(3 * BATCH_SIZE))
    assert one.delivery.behind == one.outbox.count == 0
    assert one.delivery.lag(NOON) == 0


async def test_what_a_broker_lost_is_sent_again_and_nothing_else(tmp_path):
    one = Delivering(tmp_path, 5 * BATCH_SIZE)
    one.ledger.lose = set(range(600, 700))
    await one.turns(6)
    had = one.ledger.had
    assert set(range(5 * BATCH_SIZE)) - set(had) == set(range(600, 700))
    assert (one.delivery.behind, one.delivery.lag(NOON + timedelta(seconds=7))) == (100, 7)
    await one.turns(3)
    assert len(had) == 5 * BATCH_SIZE - 100
    # Events that come later do not put off the first one that is missing.
    for one.now in range(1, 10):
        add(one.outbox, [5 * BATCH_SIZE + one.now])
        await one.turns(1)
    one.now = 11
    await one.turns(3)
    assert set(range(5 * BATCH_SIZE)) <= set(had)
    assert (len(had), one.delivery.behind) == (5 * BATCH_SIZE + 9, 0)


async def test_while_the_ledger_stands_still_ever_less_is_sent_again(tmp_path):
    one = Delivering(tmp_path, 5 * BATCH_SIZE)
    one.ledger.confirmed = AsyncMock(return_value=frozenset())
    await one.turns(5)
    sent = len(one.ledger.had)
    for one.now in range(1000):
        await one.turns(1)
    # after 10, 20, 40 s, and then once a minute: at 10, 30, 70, 130 … 970
    assert len(one.ledger.had) - sent == 18 * BATCH_SIZE


async def test_a_sink_that_is_away_is_tried_again(tmp_path, caplog):
    one = Delivering(tmp_path, 5)
    one.ledger.away = True
    task = asyncio.create_task(one.delivery.run())
    await eventually(lambda: "cannot be delivered (away)" in caplog.text)
    one.ledger.away = False
    await asyncio.wait_for(one.delivery.drain(), 60)
    task.cancel()
    assert one.ledger.had == list(range(5))


async def test_a_full_disk_is_one_line_while_the_ledger_is_delivered_to(tmp_path, caplog):
    """Before the fix, each attempt to delete confirmed events logged an unexpected error with its traceback."""
    one = Delivering(tmp_path, 5)
    tries = Mock(wraps=one.outbox.delete)
    one.outbox.delete = tries
    with full_disk((tmp_path / "outbox.db-wal").stat().st_size):
        task = asyncio.create_task(one.delivery.run())
        await eventually(lambda: tries.call_count == 3)
    await asyncio.wait_for(one.delivery.drain(), 60)
    task.cancel()
    assert one.ledger.had[:5] == list(range(5))
    (line,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert line.getMessage().startswith("Usage cannot be delivered (the outbox: ")
    assert line.exc_info is None


async def test_a_restored_snapshot_is_delivered_again_and_loses_nothing(tmp_path):
    """The folder is one of an hour ago: the ledger has some of it, and later events under numbers behind it."""
    folder = tmp_path / "gw-1"
    folder.mkdir()
    one = Delivering(folder, 10)
    await one.outbox.checkpoint()
    snapshot = shutil.copytree(folder, tmp_path.with_suffix(".snapshot"))
    await one.turns(1)
    add(one.outbox, range(10, 15))
    await one.turns(1)
    one.outbox.close()
    shutil.rmtree(folder)
    shutil.copytree(snapshot, folder)
    check = UsageCheck(tmp_path, UsageSettings(), one.ledger, NoPrices())
    await check.start()
    ask(check.worker.writer, 77)
    await check.settle(30)
    await eventually(lambda: not folder.exists())
    await check.close()
    # the snapshot's events a second time, which a ledger ignores, and the new event under a new gateway's number 0
    assert (sorted(one.ledger.had), len(one.ledger.ids)) == (sorted([*range(15), *range(10), 0]), 16)


@pytest.mark.parametrize("restored", [True, False])
async def test_an_outbox_that_ends_before_the_ledger_is_reported(tmp_path, caplog, restored):
    """Before the fix, a gateway said nothing, because the files of a restored folder agree with each other."""
    folder = tmp_path / "gw-1"
    folder.mkdir()
    one = Delivering(folder, 10)
    await one.outbox.checkpoint()
    snapshot = shutil.copytree(folder, tmp_path.with_suffix(".snapshot"))
    add(one.outbox, range(10, 15))
    await one.turns(1)
    add(one.outbox, [15])
    one.outbox.close()
    if restored:
        shutil.rmtree(folder)
        shutil.copytree(snapshot, folder)
    check = UsageCheck(tmp_path, UsageSettings(), one.ledger, NoPrices())
    await check.start()
    await check._adopted_all.wait()
    await check.close()
    line = "The outbox of the gateway gw-1 ended before event 10, but the ledger has all events before 15."
    assert [one.startswith(line) for one in caplog.messages if "ended before" in one] == [True] * restored


async def test_the_ended_answer_of_a_killed_gateway_does_not_make_its_outbox_an_older_copy(tmp_path, caplog):
    """Before the fix, each gateway that was killed before it wrote its last events to the outbox was reported so."""
    folder = tmp_path / "gw-1"
    folder.mkdir()
    writer = OutboxWriter(folder, UsageOutbox(folder), NoPrices())
    ask(writer, 5)
    check = UsageCheck(tmp_path, UsageSettings(), ledger := Ledger(), NoPrices())
    await check.start()
    await check._adopted_all.wait()
    await check.close()
    assert (ledger.had, "ended before" in caplog.text) == ([0], False)


async def test_the_full_outbox_of_a_killed_gateway_is_delivered(tmp_path, monkeypatch):
    """Before the fix, an outbox of 1 GiB whose slots hold events was never delivered."""
    folder, limit = tmp_path / "gw-1", UsageOutbox.limit
    folder.mkdir()
    # 128 KiB stand for 1 GiB
    monkeypatch.setattr(UsageOutbox, "limit", lambda outbox, size: limit(outbox, size // 2**13))
    writer = OutboxWriter(folder, UsageOutbox(folder, UsageSettings().bytes), NoPrices())
    count = 0
    while not writer.trouble:
        ask(writer, count := count + 1)
        writer.flush()
    check = UsageCheck(tmp_path, UsageSettings(), ledger := Ledger(), NoPrices())
    await check.start()
    await check._adopted_all.wait()
    await check.close()
    assert (len(ledger.ids), folder.exists()) == (count, False)


@pytest.mark.parametrize("failing", ["find_owners", "remove", "quarantine"])
async def test_an_outbox_that_could_not_be_opened_is_opened_later(tmp_path, monkeypatch, failing):
    """Before the fix, the gateway kept the folder's lock, and never tried again."""
    folder = tmp_path / "gw-1"
    folder.mkdir()
    outbox = UsageOutbox(folder)
    if failing != "remove":
        add(outbox, [0])
    ask(OutboxWriter(folder, outbox, NoPrices()), 0, end=False)
    outbox.close()
    if failing == "quarantine":
        (folder / "outbox.db").write_bytes(b"damaged" * 1000)
    fail = Mock(side_effect=OSError("a bad moment"))
    check = UsageCheck(tmp_path, UsageSettings(), Ledger(), NoPrices())
    with monkeypatch.context() as patch:
        if failing == "find_owners":
            check.find_owners = AsyncMock(side_effect=RuntimeError)
            patch.setattr("llmops.gateway.usage.usage_check.shared_answer_ids", lambda folder: ["one"])
        else:
            patch.setattr(FolderLock, failing, fail)
        await check.start()
        await check._adopted_all.wait()
    (found, *others) = sorted(lock_abandoned_folders(tmp_path), key=lambda one: one.folder != folder)
    assert found.folder == folder
    for one in (found, *others):
        one.release()
    await check.close()


class Held(Ledger):
    """A ledger that is behind a lock, a silent server or a broker that is away, until it is `free`."""

    def __init__(self, is_silent: bool) -> None:
        super().__init__()
        self.is_silent, self.tries, self.free = is_silent, 0, asyncio.Event()

    async def write(self, events) -> None:
        self.tries += 1
        if self.is_silent:
            await self.free.wait()
        elif not self.free.is_set():
            raise UnavailableError("away")
        await super().write(events)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("is_free", [True, False])
async def test_an_end_while_events_wait_in_memory(tmp_path, caplog, monkeypatch, is_silent, is_free):
    """The outbox is full and has no slot left, and the ledger comes back during the end of the gateway, or not.

    Before the fix, the events in memory were lost without a word; the next gateway called the outbox an older copy, and
    no number was missing in the ledger.
    """
    monkeypatch.setattr("llmops.gateway.usage.usage_check.BATCH_DELAY", 0.01)
    monkeypatch.setattr("llmops.gateway.usage.usage_check.DRAIN_TIMEOUT", 0.01)
    if not is_free:
        monkeypatch.setattr("llmops.gateway.usage.usage_check.UNSAVED_TIMEOUT", 0.01)
    settings = UsageSettings(when_full="serve")
    check = UsageCheck(tmp_path / "usage", settings, ledger := Held(is_silent), NoPrices())
    await check.start()
    worker = check.worker
    monkeypatch.setattr(worker.writer._slots, "_grow", Mock(side_effect=OSError))
    with full_disk(0):
        for tokens in range(300):
            ask(worker.writer, tokens)
        assert (worker.writer.pending, worker.writer.unsaved) == (300, 45)
        end = asyncio.create_task(check.close())
        await eventually(lambda: ledger.tries > 1)
        if is_free:
            ledger.free.set()
        await end
    lost = "45 usage events are lost and not billed, because neither the outbox ("
    assert [one.startswith(lost) for one in caplog.messages if "lost" in one] == [True] * (not is_free)
    assert f"255 usage events stay in {worker.lock.folder}" in caplog.text
    assert sorted(ledger.had) == (list(range(255, 300)) if is_free else [])
    caplog.clear()
    ledger.free.set()
    again = UsageCheck(tmp_path / "usage", settings, ledger, NoPrices())
    await again.start()
    monkeypatch.setattr(ledger, "next_number", AsyncMock(return_value=300))
    await again._adopted_all.wait()
    await again.close()
    # What is lost is missing between other numbers, which the ledger notices.
    assert sorted(set(ledger.had)) == (list(range(300)) if is_free else [*range(254), 299])
    lost = f"45 usage events are lost with the gateway {worker.lock.folder.name} and not billed"
    assert [one.startswith(lost) for one in caplog.messages] == [True] * (not is_free)


async def test_requests_are_served_again_after_all_that_waited_in_memory_is_sent(tmp_path):
    outbox = UsageOutbox(tmp_path)
    writer = OutboxWriter(tmp_path, outbox, NoPrices())
    writer._slots.take = lambda: None
    with full_disk(0):
        ask(writer, 1)
        assert writer.trouble
        writer.drop(writer.next_unsaved(10))
        writer.flush()
        assert (writer.pending, writer.unsaved) == (0, 0)
    writer.flush()
    assert not writer.trouble
    assert outbox.last_place == 1


async def test_an_outbox_is_found_however_the_store_s_url_is_written(tmp_path, monkeypatch, caplog):
    """After a kill, 10 of 20 bills were lost without a word, because the store's path was written in another way."""
    monkeypatch.chdir(tmp_path)

    async def start(store: str) -> UsageCheck:
        check = create_usage_check(GatewaySettings(store=store, usage=UsageSettings(outbox=tmp_path / "usage")))
        await check.start()
        return check

    spellings = [f"sqlite:///{tmp_path}/store.db", f"sqlite:///{tmp_path}/../{tmp_path.name}/store.db"]
    checks = [await start(store) for store in [*spellings, "sqlite:///store.db"]]
    folders = sorted((tmp_path / "usage").glob("*/gw-*"))
    assert (len(folders), len({folder.parent for folder in folders})) == (3, 1)
    assert not caplog.messages
    # of a PostgreSQL that got a new name, only the operator knows that it is the same
    checks.append(await start("postgresql://127.0.0.1:1/renamed"))
    assert f"{tmp_path / 'usage'} has 3 outboxes of other stores." in caplog.text
    for check in checks:
        await check.close()
