"""The journal and the page, torn, full, killed: what was whole is there once, under numbers without a gap."""

from __future__ import annotations

import asyncio
import resource
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome, Usage, UsageEvent
from llmops.gateway.usage import outbox as journals
from llmops.gateway.usage.delivery import BATCH_SIZE, UsageDelivery
from llmops.gateway.usage.event_formats import (
    format_event_id,
    from_cloud_event,
    from_journal_line,
    new_event_id,
    to_cloud_event,
    to_journal_line,
)
from llmops.gateway.usage.open_answers import SLOTS_PER_CHUNK, OpenAnswers, read_unfinished
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.outbox_folders import claim, lock_abandoned_folders
from llmops.gateway.usage.outbox_writer import OutboxWriter
from llmops.gateway.usage.sink import NoPrices, UsageSink

NOON = datetime(2026, 11, 22, 12, 0, 0, 123456, tzinfo=UTC)
ANN = Caller("acme", str(UUID(int=7)), "key-a", tier="pro")


def event(seq: int, gateway: str = "gw-1", **changes) -> UsageEvent:
    made = UsageEvent(
        str(UUID(int=1000 + seq)),
        gateway,
        seq,
        NOON,
        f"chatcmpl-{seq}",
        "acme",
        str(UUID(int=7)),
        "key-a",
        "smollm2",
        37,
    )
    return made._replace(output_tokens=seq, **changes)


@pytest.fixture(autouse=True)
def read_from_the_disk(monkeypatch):
    """What is also in memory would hide what is not in the files."""
    monkeypatch.setattr(journals, "NEWEST", 0)


async def all_of(journal: UsageOutbox, since: int = 0) -> list[UsageEvent]:
    await journal.sync()
    return await journal.read(since, 10**6)


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
    assert from_journal_line(to_journal_line(one)) == one
    assert to_journal_line(one).count(b"\n") == 1
    assert from_cloud_event(to_cloud_event(one)) == one


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


@pytest.mark.parametrize(
    "message", [b"", b"{}", b"[1]", b"\xff", b'{"type":"other","source":"gateway/x","id":"1"}',
                b'{"type":"llmops.usage.v1","source":"gateway/x","id":"no","time":"2026-11-22T12:00:00Z","data":{}}'],
)  # fmt: skip
def test_what_is_no_event_of_usage_is_refused(message):
    with pytest.raises(ValueError):  # noqa: PT011
        from_cloud_event(message)


def test_ids_are_in_the_order_of_time():
    made = [UUID(format_event_id(*new_event_id())) for _ in range(100)]
    assert {one.version for one in made} == {7}
    assert {one.variant for one in made} == {UUID(int=0x8 << 60).variant}
    assert len(set(made)) == 100
    assert [one.int >> 80 for one in made] == sorted(one.int >> 80 for one in made)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_power_cut_leaves(data):
    """The end of the last segment is cut off, or a stretch of it is not what was written."""
    with TemporaryDirectory() as folder:
        asyncio.run(torn(Path(folder) / "gw-1", data))


async def torn(folder: Path, data) -> None:
    folder.mkdir()
    journal = UsageOutbox(folder, segment=2000)
    count = data.draw(st.integers(1, 25))
    for seq in range(count):
        journal.append(event(seq))
    journal.close()
    last = max(folder.glob("*.journal"))
    whole = last.read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    damage = data.draw(st.sampled_from(["cut", "zeros", "garbage"]))
    if damage == "cut":
        last.write_bytes(whole[:at])
    else:
        some = bytes(40) if damage == "zeros" else data.draw(st.binary(min_size=1, max_size=40))
        last.write_bytes((whole[:at] + some + whole[at + len(some) :])[: len(whole)])
    before = await_lines(folder)
    again = UsageOutbox(folder, segment=2000)
    found = await all_of(again)
    assert {one.id for one in found} == before
    assert [one.seq for one in found] == list(range(len(before)))
    # it goes on behind them, and a third process finds the same
    again.append(event(again.next_seq, id=str(UUID(int=5))))
    again.close()
    third = UsageOutbox(folder, segment=2000)
    assert [one.id for one in await all_of(third)] == [*(one.id for one in found), str(UUID(int=5))]
    third.close()


def await_lines(folder: Path) -> set[str]:
    """The ids of all lines that are whole, counted by hand."""
    found = set()
    for path in folder.glob("*.journal"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                found.add(from_journal_line(line + b"\n").id)
            except ValueError:
                continue
    return found


async def test_segments_go_when_the_ledger_has_them(tmp_path):
    journal = UsageOutbox(tmp_path, segment=2000)
    for seq in range(100):
        journal.append(event(seq, gateway=tmp_path.name))
    everything = await all_of(journal)
    assert [one.seq for one in everything] == list(range(100))
    # in any steps, from anywhere
    assert [one.seq for one in await journal.read(50, 7)] == list(range(50, 57))
    assert [one.seq for one in await journal.read(57, 30)] == list(range(57, 87))
    assert [one.seq for one in await journal.read(3, 2)] == [3, 4]
    size, files = journal.size, len(list(tmp_path.glob("*.journal")))
    assert files > 5
    journal.forget(60)
    assert journal.first_seq <= 60
    assert [one.seq for one in await journal.read(60, 100)] == list(range(60, 100))
    assert journal.size == sum(path.stat().st_size for path in tmp_path.glob("*.journal")) < size
    journal.forget(100)
    assert len(list(tmp_path.glob("*.journal"))) == 1
    journal.close()
    again = UsageOutbox(tmp_path, segment=2000)
    assert again.next_seq == 100
    again.close()


@pytest.mark.parametrize("damaged", [[0], [5, 6], [11], list(range(12, 17)), [38, 39]], ids=str)
async def test_lines_that_the_disk_lost_are_told_and_hold_up_nobody(tmp_path, caplog, damaged):
    """Segments of three or four events, the last of which was whole when the journal was taken up."""
    journal = UsageOutbox(tmp_path, segment=1000)
    for seq in range(40):
        journal.append(event(seq, gateway=tmp_path.name))
    await journal.sync()
    for path in tmp_path.glob("*.journal"):
        lines = path.read_bytes().splitlines(keepends=True)
        first = int(path.stem)
        for at, line in enumerate(lines):
            if first + at in damaged:
                lines[at] = b"#" + line[1:]
        path.write_bytes(b"".join(lines))
    found = await journal.read(0, 100)
    assert [one.seq for one in found] == list(range(40))
    assert [one.seq for one in found if one.finish_reason == "damaged"] == damaged
    assert len({one.id for one in found}) == 40
    # in steps as well, and always the same
    steps = [one for at in range(0, 40, 3) for one in await journal.read(at, 3)]
    assert [one.id for one in steps] == [one.id for one in found]
    assert f"The line of event {damaged[0]} of {tmp_path.name} is damaged" in caplog.text
    journal.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.sampled_from(["append", "sync", "read", "forget"]), st.integers(0, 30)), max_size=40)
)
def test_the_newest_are_what_is_in_the_files(steps, monkeypatch):
    """Whatever was appended, synced and forgotten before: read from anywhere, only what is on the disk, in order."""

    async def run(folder: Path) -> None:
        journal = UsageOutbox(folder, segment=2000)
        for what, number in steps:
            if what == "append":
                for seq in range(journal.next_seq, journal.next_seq + number % 5):
                    journal.append(event(seq, gateway=folder.name))
            elif what == "sync":
                await journal.sync()
            elif what == "forget":
                journal.forget(min(number, journal.synced))
            else:
                since = max(number, journal.first_seq)
                wanted = range(since, min(since + 7, journal.synced))
                assert await journal.read(since, 7) == [event(seq, gateway=folder.name) for seq in wanted]
        journal.close()

    monkeypatch.setattr(journals, "NEWEST", 6)
    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


async def test_what_is_not_on_the_disk_is_not_shipped(tmp_path):
    journal = UsageOutbox(tmp_path)
    journal.append(event(0))
    assert await journal.read(0, 10) == []
    await journal.sync()
    assert len(await journal.read(0, 10)) == 1
    journal.close()


# -- no room ---------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(size: int):
    """No file can grow beyond `size`: the system writes what fits, and then says no."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_loses_nothing_and_says_so(tmp_path):
    journal = UsageOutbox(tmp_path)
    meter = OutboxWriter(tmp_path, journal, NoPrices())
    ask(meter, 1)
    with full_disk(journal.size + 10):
        ask(meter, 2)
        ask(meter, 3)
        assert meter.trouble == "No space left on device"
        assert journal.next_seq == 1
        # a process that is killed now leaves them on its page
        assert sorted(left.tokens for left in read_unfinished(tmp_path / "page")[0]) == [2, 3]
        meter.retry()
        assert meter.trouble
    meter.retry()
    assert meter.trouble == ""
    assert [one.output_tokens for one in await all_of(journal)] == [1, 2, 3]
    assert read_unfinished(tmp_path / "page") == ([], 0)


async def test_a_journal_that_nobody_empties_is_bounded(tmp_path):
    journal = UsageOutbox(tmp_path, most=4000)
    meter = OutboxWriter(tmp_path, journal, NoPrices())
    for tokens in range(1, 40):
        ask(meter, tokens)
    assert 3000 < journal.size <= 4000
    assert "the ledger lacks" in meter.trouble
    had: list[int] = []
    # the ledger gets all there is, again and again
    while meter.trouble:
        had += [one.output_tokens for one in await all_of(journal, len(had))]
        journal.forget(journal.next_seq)
        meter.retry()
    had += [one.output_tokens for one in await all_of(journal, len(had))]
    assert had == list(range(1, 40))


def ask(meter: OutboxWriter, tokens: int, end: bool = True) -> None:
    context = RequestContext("req_1", caller=ANN)
    tally = meter.tally(context)
    tally.begin("smollm2", f"chatcmpl-{tokens}", 37)
    tally.count(tokens)
    if end:
        tally.end(Outcome(200, "stop", Usage(37, tokens)), context.started)
        tally.end(Outcome(0, "cancelled", Usage(37, 0)))


# -- what a process that dies leaves ---------------------------------------------------------------------------------


async def test_open_answers_of_a_gateway_that_died_become_events(tmp_path):
    journal = UsageOutbox(tmp_path)
    meter = OutboxWriter(tmp_path, journal, NoPrices())
    ask(meter, 5)
    for tokens in (7, 0, 9):
        ask(meter, tokens, end=False)
    again = UsageOutbox(tmp_path)
    OutboxWriter(tmp_path, again, NoPrices())
    ended, *lost = await all_of(again)
    assert (ended.output_tokens, ended.finish_reason) == (5, "stop")
    assert sorted(one.output_tokens for one in lost) == [7, 9]
    assert {(one.status, one.finish_reason, one.tenant_id, one.key_id, one.model, one.priority) for one in lost} == {
        (0, "gateway_lost", "acme", "key-a", "smollm2", "pro")
    }
    assert {one.request_id for one in lost} == {"chatcmpl-7", "chatcmpl-9"}
    # once, however often it is looked at
    third = UsageOutbox(tmp_path)
    OutboxWriter(tmp_path, third, NoPrices())
    assert len(await all_of(third)) == 3


async def test_killed_between_the_journal_and_the_page(tmp_path):
    """The event is in the journal, its slot still open: it must not come twice."""
    journal = UsageOutbox(tmp_path)
    meter = OutboxWriter(tmp_path, journal, NoPrices())
    meter.drop = lambda slot: None
    ask(meter, 5)
    assert len(read_unfinished(tmp_path / "page")[0]) == 1
    again = UsageOutbox(tmp_path)
    OutboxWriter(tmp_path, again, NoPrices())
    assert [one.finish_reason for one in await all_of(again)] == ["stop"]


def test_a_page_grows(tmp_path):
    page = OpenAnswers(tmp_path / "page")
    slots = [page.take() for _ in range(SLOTS_PER_CHUNK + 5)]
    for at, slot in enumerate(slots):
        slot.open(new_event_id(), 10**15, at, ["m" * at, "é" * 600])
    found, _ = read_unfinished(tmp_path / "page")
    assert [one.prompt for one in found] == list(range(SLOTS_PER_CHUNK + 5))
    assert found[3].texts[0] == "mmm"
    for slot in slots:
        page.give(slot)
    assert read_unfinished(tmp_path / "page") == ([], 0)
    page.close()


def test_a_folder_is_one_processes(tmp_path):
    root = tmp_path / "usage"
    first = claim(root)
    second = claim(root)
    assert first.folder != second.folder
    assert list(lock_abandoned_folders(root)) == []
    first.give_back()
    (third,) = lock_abandoned_folders(root)
    assert third.folder == first.folder
    third.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


# -- shipping --------------------------------------------------------------------------------------------------------


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


class Shipping:
    """A shipper turned by hand, with a clock that is set by hand."""

    def __init__(self, folder: Path, count: int) -> None:
        self.journal, self.ledger, self.now = UsageOutbox(folder, segment=20_000), Ledger(), 0.0
        for seq in range(count):
            self.journal.append(event(seq))
        self.shipper = UsageDelivery(self.journal, self.ledger, patience=10, clock=lambda: self.now)

    async def turns(self, count: int) -> None:
        await self.journal.sync()
        for _ in range(count):
            await self.shipper._turn()


async def test_batches_and_deleting_behind_the_mark(tmp_path):
    shipping = Shipping(tmp_path, 3 * BATCH_SIZE)
    await shipping.turns(3)
    assert shipping.ledger.had == list(range(3 * BATCH_SIZE))
    assert len(list(tmp_path.glob("*.journal"))) == 1
    assert shipping.shipper.drained.is_set()
    assert shipping.shipper.behind == 0


async def test_what_a_broker_lost_is_sent_again_and_nothing_else(tmp_path):
    shipping = Shipping(tmp_path, 5 * BATCH_SIZE)
    shipping.ledger.lose = set(range(600, 700))
    await shipping.turns(6)
    had = shipping.ledger.had
    assert set(range(5 * BATCH_SIZE)) - set(had) == set(range(600, 700))
    assert shipping.shipper.behind == 5 * BATCH_SIZE - 600
    await shipping.turns(3)
    assert len(had) == 5 * BATCH_SIZE - 100
    shipping.now = 11
    await shipping.turns(2)
    assert set(had) == set(range(5 * BATCH_SIZE))
    assert len(had) == 5 * BATCH_SIZE
    assert shipping.shipper.behind == 0


async def test_while_the_ledger_stands_still_ever_less_is_sent_again(tmp_path):
    shipping = Shipping(tmp_path, 5 * BATCH_SIZE)
    shipping.ledger.confirmed = nothing
    await shipping.turns(5)
    sent = len(shipping.ledger.had)
    for shipping.now in range(1000):
        await shipping.turns(1)
    # after 10, 20, 40 s, and then once a minute: at 10, 30, 70, 130 … 970
    assert len(shipping.ledger.had) - sent == 18 * BATCH_SIZE


async def nothing(ids) -> frozenset[str]:
    return frozenset()


async def test_a_sink_that_is_away_is_tried_again(tmp_path, caplog):
    shipping = Shipping(tmp_path, 5)
    shipping.ledger.away = True
    await shipping.journal.sync()
    task = asyncio.create_task(shipping.shipper.run())
    while "cannot be shipped (away)" not in caplog.text:
        await asyncio.sleep(0.01)
    shipping.ledger.away = False
    await asyncio.wait_for(shipping.shipper.drained.wait(), 60)
    task.cancel()
    assert shipping.ledger.had == list(range(5))


async def test_a_ledger_that_forgot_cannot_be_given_what_is_gone(tmp_path):
    """Its database was set up anew: what is still here is sent, the rest is for the reconciler to tell."""
    shipping = Shipping(tmp_path, 3 * BATCH_SIZE)
    await shipping.turns(3)
    first = shipping.journal.first_seq
    assert first > 0
    shipping.journal.append(event(3 * BATCH_SIZE))
    await shipping.journal.sync()
    shipping.ledger.had.clear()
    shipping.ledger.ids.clear()
    again = UsageDelivery(UsageOutbox(tmp_path, segment=20_000), shipping.ledger)
    for _ in range(3):
        await again._turn()
    assert shipping.ledger.had[:1] == [first]
