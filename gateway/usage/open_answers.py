"""Memory-mapped slots of requests whose events are not in the outbox yet.

The slots survive a process that is killed.

    FREE ──open──▶ OPEN ──end──▶ ENDED ──release──▶ FREE
                     └──▶ SHARED ──┘

The first slot is never used: it holds a mark, which `OutboxWriter.flush` advances here and in the
outbox, so that a file which is older than its outbox is noticed, and the number of events that only
the memory has.

OPEN: the answer is running. The slot holds the tokens used so far; the count is updated with each
message of the engine, which costs one write to memory. ENDED: the answer is over, and the slot
holds the answer's event until the outbox has the event. SHARED: like OPEN, but another gateway may
continue the answer and bill all of it. A slot that is not free after a crash is billed: by the
event in it, or else as `gateway_lost`.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from llmops.gateway.usage.event_formats import EncodedEvent, decode_event, format_event_id

#: Sizes in bytes: a whole slot, its eight numbers, and the texts of an open answer. The rest of a
#: slot is for the event of an ended answer.
SLOT_BYTES, NUMBERS_BYTES, TEXT_BYTES = 2048, 64, 960
SLOTS_PER_CHUNK = 256
#: Maximum number of slots read from the file of a dead process; no process has as many open
#: answers. Bounds the memory that a damaged file takes.
MAX_SLOTS = 2**16
STATE, HIGH, LOW, STARTED, PROMPT, CACHED, TOKENS, LENGTH = range(8)
FREE, OPEN, ENDED, SHARED = range(4)
#: Indices of the mark and of the number of unsaved events in the first slot, whose state stays FREE.
MARK, UNSAVED = HIGH, LOW
_AFTER_STATE_OFFSET, _FIELDS_AFTER_STATE = 8, Struct("=7q")
#: Header of an event: the lengths of its id and of its body, and its checksum.
_EVENT_HEADER = Struct("=HHI")
_EVENT_OFFSET = TEXT_BYTES
_MAX_EVENT_BYTES = SLOT_BYTES - NUMBERS_BYTES - TEXT_BYTES - _EVENT_HEADER.size
#: Upper bound of a plausible number of tokens: a larger number means that the slot is damaged.
MAX_TOKENS = 2**31 - 1
#: Earliest plausible start in microseconds since 1970, in 2001: an earlier start means that the slot
#: is damaged.
EARLIEST = 10**15
#: Latest plausible start in microseconds since 1970, in 2200: a later start means that the slot is
#: damaged.
LATEST = 7_258_118_400_000_000
_SEPARATOR = "\x1f"


class UnfinishedAnswer(NamedTuple):
    """The usage of an answer whose process died while the answer ran.

    Attributes:
        id: The event's id.
        started: The start of the answer, in UTC.
        prompt: Tokens of the prompt.
        cached: Tokens of the prompt that were in the engine's cache.
        tokens: Tokens generated so far.
        texts: The texts passed to `AnswerSlot.open`.
        is_shared: True if another gateway may have continued the answer.
    """

    id: str
    started: datetime
    prompt: int
    cached: int
    tokens: int
    texts: list[str]
    is_shared: bool = False


class OpenSlots(NamedTuple):
    """The used slots that a dead process left.

    Attributes:
        unfinished: The answers that were running.
        ended: The events of answers that had ended.
        damaged: The number of damaged slots.
        mark: The mark of the file; 0 without a file.
        unsaved: The number of events that only the dead process had in its memory.
    """

    unfinished: list[UnfinishedAnswer]
    ended: list[EncodedEvent]
    damaged: int
    mark: int = 0
    unsaved: int = 0


class AnswerSlot:
    """The slot of one answer.

    Code that counts tokens writes to `numbers` directly, which is faster than a call per token.
    """

    __slots__ = ("numbers", "text")

    def __init__(self, numbers: memoryview[int], text: memoryview) -> None:
        self.numbers, self.text = numbers, text

    def open(self, event_id: tuple[int, int], started: int, prompt: int, texts: list[str]) -> None:
        """Record a running answer in the slot.

        Args:
            event_id: The two numbers of `new_event_id`.
            started: The start of the answer, in microseconds since 1970.
            prompt: Tokens of the prompt.
            texts: Texts for the event; the joined texts are cut to `TEXT_BYTES`.
        """
        data = _SEPARATOR.join(texts).encode("utf-8", "replace")[:TEXT_BYTES]
        self.text[: len(data)] = data
        high, low = event_id
        _FIELDS_AFTER_STATE.pack_into(self.numbers, _AFTER_STATE_OFFSET, high, low, started, prompt, 0, 0, len(data))
        # Set the state last, so that a process killed before this line leaves a free slot.
        self.numbers[STATE] = OPEN

    def end(self, event: EncodedEvent) -> bool:
        """Store the event of an ended answer in the slot.

        Return False, and leave the slot open, if the event is too long.
        """
        event_id, checksum, body = event
        if len(body) > _MAX_EVENT_BYTES - len(event_id):
            return False
        header = _EVENT_HEADER.pack(len(event_id), len(body), checksum)
        data = header + event_id.encode() + body
        self.text[_EVENT_OFFSET : _EVENT_OFFSET + len(data)] = data
        self.numbers[STATE] = ENDED
        return True


class OpenAnswers:
    """All slots of one process, in a memory-mapped file.

    The file grows in chunks whose disk space is allocated first: a write to mapped memory without
    disk space kills the process.

    Attributes:
        header: The numbers of the first slot; see `MARK` and `UNSAVED`.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, or empty an existing file.

        Raises:
            OSError: The disk has no space for the file.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, 0)
        self._chunks = 0
        self._free: list[AnswerSlot] = []
        try:
            self._grow()
        except OSError:
            os.close(self._file)
            raise
        self.header = self._free.pop().numbers

    def take(self) -> AnswerSlot | None:
        """Return a free slot, or None if the disk has no space for another chunk."""
        if not self._free:
            try:
                self._grow()
            except OSError:
                return None
        return self._free.pop()

    def release(self, slot: AnswerSlot) -> None:
        """Mark the slot as free."""
        slot.numbers[STATE] = FREE
        self._free.append(slot)

    def close(self) -> None:
        """Close the file. Open answers stay in the file, and slots in use can still be written."""
        os.close(self._file)

    def _grow(self) -> None:
        size, offset = SLOTS_PER_CHUNK * SLOT_BYTES, self._chunks * SLOTS_PER_CHUNK * SLOT_BYTES
        os.posix_fallocate(self._file, offset, size)
        chunk = memoryview(mmap.mmap(self._file, size, offset=offset))
        self._chunks += 1
        for start in range(size - SLOT_BYTES, -SLOT_BYTES, -SLOT_BYTES):
            numbers, text = chunk[start : start + NUMBERS_BYTES], chunk[start + NUMBERS_BYTES : start + SLOT_BYTES]
            self._free.append(AnswerSlot(numbers.cast("q"), text))


def read_slots(path: Path) -> OpenSlots:
    """Return the slots in the file of a dead process that are not free.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    slots, damaged, mark, unsaved = OpenSlots([], [], 0), 0, 0, 0
    for at, data in enumerate(_slot_bytes(path)):
        if len(data) < SLOT_BYTES:
            damaged += 1
            continue
        numbers, text = memoryview(data)[:NUMBERS_BYTES].cast("q"), data[NUMBERS_BYTES:]
        # a damaged first slot is not free, and is counted below
        if at == 0 and numbers[STATE] == FREE:
            mark, unsaved = numbers[MARK], min(max(numbers[UNSAVED], 0), MAX_TOKENS)
        try:
            if numbers[STATE] == ENDED:
                slots.ended.append(_read_event(text))
            elif numbers[STATE] != FREE:
                slots.unfinished.append(_read_answer(numbers, text))
        except ValueError:
            damaged += 1
    return slots._replace(damaged=damaged, mark=mark, unsaved=unsaved)


def _slot_bytes(path: Path) -> Iterator[bytes]:
    """Yield the bytes of each slot, one at a time.

    A damaged file may have more slots than fit into memory.
    """
    try:
        # Without O_NONBLOCK, opening a pipe in the file's place would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with open(file, "rb") as slots:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        for _ in range(MAX_SLOTS):
            data = slots.read(SLOT_BYTES)
            if not data:
                return
            yield data


def _read_event(text: bytes) -> EncodedEvent:
    """Return the event in a slot.

    Raises:
        ValueError: The slot does not hold an event that `AnswerSlot.end` wrote.
    """
    id_length, body_length, checksum = _EVENT_HEADER.unpack_from(text, _EVENT_OFFSET)
    start = _EVENT_OFFSET + _EVENT_HEADER.size
    body = text[start + id_length : start + id_length + body_length]
    event = EncodedEvent(text[start : start + id_length].decode("ascii"), checksum, body)
    decode_event(event)
    return event


def _read_answer(numbers: memoryview[int], text: bytes) -> UnfinishedAnswer:
    """Return the running answer in a slot.

    Raises:
        ValueError: The numbers are not plausible, so the slot is damaged.
    """
    if not (
        numbers[STATE] in (OPEN, SHARED)
        and numbers[HIGH] >= 0
        and 0 <= numbers[LOW] < 1 << 62
        and EARLIEST <= numbers[STARTED] <= LATEST
        and 0 <= numbers[CACHED] <= numbers[PROMPT] <= MAX_TOKENS
        and 0 <= numbers[TOKENS] <= MAX_TOKENS
        and 0 < numbers[LENGTH] <= TEXT_BYTES
    ):
        raise ValueError("the slot is damaged")
    return UnfinishedAnswer(
        id=format_event_id(numbers[HIGH], numbers[LOW]),
        started=datetime.fromtimestamp(numbers[STARTED] / 1e6, UTC),
        prompt=numbers[PROMPT],
        cached=numbers[CACHED],
        tokens=numbers[TOKENS],
        texts=text[: numbers[LENGTH]].decode("utf-8", "ignore").split(_SEPARATOR),
        is_shared=numbers[STATE] == SHARED,
    )
