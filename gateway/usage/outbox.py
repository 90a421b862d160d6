"""The journal: events in the order of their numbers, in files to which only is appended.

A line is in the system's hands when `append` returns, so that killing this process loses none, and on the disk after
the next `sync`. Only what is on the disk is shipped: a line that a power cut tore was never seen by anybody, and its
number is free again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.usage.event_formats import from_journal_line, to_journal_line

log = logging.getLogger(__name__)

SEGMENT_BYTES = 4 * 2**20
MAX_BYTES = 2**30
# the newest events, which need not be read again as long as a ledger keeps up
MAX_CACHED_EVENTS = 1024
_SUFFIX = ".journal"
DAMAGED = "damaged"


class EventPosition(NamedTuple):
    """Where the event with the number `seq` begins: in the segment that begins with `first`."""

    seq: int
    first: int
    offset: int


class UsageOutbox:
    """Of one gateway worker, in a folder that only it uses. `gateway_id` is the folder's name.

    `append` and `forget` are for one thread; `sync` and `read` work in others beside them.
    """

    def __init__(self, folder: Path, most: int = MAX_BYTES, segment: int = SEGMENT_BYTES) -> None:
        """What is there is taken up. Raises OSError when the folder cannot be written."""
        self.gateway_id = folder.name
        self._folder, self._most, self._segment = folder, most, min(segment, most // 8)
        self._firsts = sorted(_segment_numbers(folder)) or [0]
        self.next_seq = self._firsts[-1]
        # bytes of the last segment, and of all before it
        self._size, self._before = 0, sum(_segment_path(folder, first).stat().st_size for first in self._firsts[:-1])
        self._rotated: list[int] = []
        self._place = EventPosition(-1, 0, 0)
        self._newest: deque[UsageEvent] = deque(maxlen=MAX_CACHED_EVENTS)
        self._file = self._open(self.next_seq)
        # ids of what was in its last segment, for who takes it up
        self.found: set[str] = set()
        self._take_up()
        os.fsync(self._file)
        self._sync_folder()
        self.synced = self.next_seq

    @property
    def first_seq(self) -> int:
        """The oldest event that is still here."""
        return self._firsts[0]

    @property
    def size(self) -> int:
        return self._before + self._size

    def append(self, event: UsageEvent) -> None:
        """`event.seq` is `next_seq`. Raises OSError, and then nothing is kept of it."""
        line = to_journal_line(event)
        size = self._size + len(line)
        if size > self._segment and self._size:
            self._rotate()
            size = len(line)
        if self._before + size > self._most:
            raise OSError(errno.EDQUOT, f"the ledger lacks {self.size:,} bytes, and the journal may hold no more")
        self._write(line)
        self._newest.append(event)
        self.next_seq += 1

    async def sync(self) -> None:
        """All that was appended before this is on the disk after it. Raises OSError."""
        seq, rotated, self._rotated = self.next_seq, self._rotated, []
        await asyncio.to_thread(self._sync, rotated, os.dup(self._file))
        self.synced = seq

    async def read(self, seq: int, most: int) -> list[UsageEvent]:
        """Up to `most` events from the number `seq` on, of those that are on the disk."""
        end, oldest = min(seq + most, self.synced), self.next_seq - len(self._newest)
        if seq >= oldest:
            return list(islice(self._newest, seq - oldest, max(end, seq) - oldest))
        return await asyncio.to_thread(self._read, seq, end, list(self._firsts))

    def forget(self, seq: int) -> None:
        """Events before `seq` are needed no more; segments that hold no other are deleted."""
        while self._newest and self._newest[0].seq < seq:
            self._newest.popleft()
        if seq >= self.next_seq and self._size > self._segment // 2:
            self._rotate()
        while len(self._firsts) > 1 and self._firsts[1] <= seq:
            path = _segment_path(self._folder, self._firsts.pop(0))
            self._before -= path.stat().st_size
            path.unlink()

    def close(self) -> None:
        """Without syncing."""
        for descriptor in (*self._rotated, self._file):
            os.close(descriptor)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        written = 0
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            if written:
                os.ftruncate(self._file, self._size)
            raise
        self._size += written

    def _rotate(self) -> None:
        new = self._open(self.next_seq)
        self._rotated.append(self._file)
        self._before += self._size
        self._firsts.append(self.next_seq)
        self._file, self._size = new, 0

    def _open(self, first: int) -> int:
        return os.open(_segment_path(self._folder, first), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _sync(self, rotated: list[int], last: int) -> None:
        try:
            for descriptor in (*rotated, last):
                os.fdatasync(descriptor)
        finally:
            for descriptor in (*rotated, last):
                os.close(descriptor)
        if rotated:
            self._sync_folder()

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take_up(self) -> None:
        """The end of the last segment may be torn: what is whole behind a torn line is written again, renumbered."""
        lines = _segment_path(self._folder, self._firsts[-1]).read_bytes().splitlines(keepends=True)
        again: list[UsageEvent] = []
        torn = False
        for line in lines:
            event = _parse_line(line)
            if event is not None and not torn and event.seq == self.next_seq:
                self.found.add(event.id)
                self._size += len(line)
                self.next_seq += 1
            else:
                torn = True
                if event is not None:
                    again.append(event)
        os.ftruncate(self._file, self._size)
        for event in again:
            moved = event._replace(seq=self.next_seq)
            self.append(moved)
            self.found.add(moved.id)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, seq: int, end: int, firsts: list[int]) -> list[UsageEvent]:
        events: list[UsageEvent] = []
        while seq < end:
            place = self._place
            if place.seq != seq or place.first not in firsts:
                place = self._find(seq, firsts)
            offset, after = place.offset, bisect_right(firsts, place.first)
            behind = min(end, firsts[after]) if after < len(firsts) else end
            with _segment_path(self._folder, place.first).open("rb") as file:
                file.seek(offset)
                for event in _events(file):
                    if event.seq >= end:
                        break
                    events += self._damaged(range(max(seq, firsts[0]), event.seq), event.at)
                    events.append(event)
                    seq, offset = event.seq + 1, file.tell()
                    if seq == end:
                        break
            events += self._damaged(range(max(seq, firsts[0]), behind), datetime.now(UTC))
            seq = max(seq, behind)
            self._place = EventPosition(seq, seq, 0) if seq in firsts else EventPosition(seq, place.first, offset)
        return events

    def _damaged(self, seqs: Iterable[int], at: datetime) -> Iterator[UsageEvent]:
        """In place of lines that the disk lost after it had them: a number that never came would hold up all behind it,
        here and in the ledger, and nobody would know."""
        for seq in seqs:
            log.error("The line of event %d of %s is damaged; what it said is lost.", seq, self.gateway_id)
            one = str(uuid5(NAMESPACE_OID, f"{self.gateway_id}/{seq}"))
            made = UsageEvent(one, self.gateway_id, seq, at, "", "", "", "", "unknown", 0)
            yield made._replace(status=0, finish_reason=DAMAGED)

    def _find(self, seq: int, firsts: list[int]) -> EventPosition:
        first = firsts[max(bisect_right(firsts, seq) - 1, 0)]
        offset = 0
        with _segment_path(self._folder, first).open("rb") as file:
            for event in _events(file):
                if event.seq >= seq:
                    break
                offset = file.tell()
        return EventPosition(seq, first, offset)


def _events(file: BinaryIO) -> Iterator[UsageEvent]:
    """From where `file` is on; after each it is behind that one. What is no event is passed over."""
    while line := file.readline():
        event = _parse_line(line)
        if event is not None:
            yield event


def _parse_line(line: bytes) -> UsageEvent | None:
    try:
        return from_journal_line(line)
    except (ValueError, TypeError, KeyError):
        return None


def _segment_numbers(folder: Path) -> Iterator[int]:
    return (int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def _segment_path(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}{_SUFFIX}"
