"""The page: what every open answer has used so far, in a file that outlives this process.

A slot is numbers and a text. A number is written with every message of the engine; that is one store to memory which
the system keeps when the process is killed. A slot that is not free when a process finds it belonged to one that died.
"""

from __future__ import annotations

import mmap
import os
from datetime import UTC, datetime
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from llmops.gateway.usage.event_formats import format_event_id

SLOT_BYTES, NUMBERS_BYTES = 1024, 64
SLOTS_PER_CHUNK = 256
STATE, HIGH, LOW, STARTED, PROMPT, CACHED, TOKENS, LENGTH = range(8)
FREE, OPEN = 0, 1
_AFTER_STATE_OFFSET, _FIELDS_AFTER_STATE = 8, Struct("=7q")
# Tokens that no request has, and times (microseconds since 1970) at which none began: 2001 and 2200.
MAX_TOKENS = 2**31 - 1
EARLIEST, LATEST = 10**15, 7_258_118_400_000_000
_SEPARATOR = "\x1f"


class UnfinishedAnswer(NamedTuple):
    """What an answer had used when its process died. `texts` as they were given to `open`."""

    id: str
    started: datetime
    prompt: int
    cached: int
    tokens: int
    texts: list[str]


class AnswerSlot:
    """The place of one answer. `numbers` can be written without a call."""

    __slots__ = ("numbers", "text")

    def __init__(self, numbers: memoryview, text: memoryview) -> None:
        self.numbers, self.text = numbers, text

    def open(self, event_id: tuple[int, int], started: int, prompt: int, texts: list[str]) -> None:
        """`started`: microseconds since 1970."""
        data = _SEPARATOR.join(texts).encode("utf-8", "replace")[: SLOT_BYTES - NUMBERS_BYTES]
        self.text[: len(data)] = data
        high, low = event_id
        _FIELDS_AFTER_STATE.pack_into(self.numbers, _AFTER_STATE_OFFSET, high, low, started, prompt, 0, 0, len(data))
        # only now does it count
        self.numbers[STATE] = OPEN


class OpenAnswers:
    """All slots of one worker. Grows in chunks, whose room on the disk is taken first: a full disk would kill the
    process when it writes to memory that has none.
    """

    def __init__(self, path: Path) -> None:
        """Empties what is there. Raises OSError when there is no room."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, 0)
        self._chunks = 0
        self._free: list[AnswerSlot] = []
        try:
            self._grow()
        except OSError:
            os.close(self._file)
            raise

    def take(self) -> AnswerSlot | None:
        """A free slot, None where there is no room for another."""
        if not self._free:
            try:
                self._grow()
            except OSError:
                return None
        return self._free.pop()

    def give(self, slot: AnswerSlot) -> None:
        slot.numbers[STATE] = FREE
        self._free.append(slot)

    def close(self) -> None:
        """The file stays, with what is open in it; slots that are still in use can be written to."""
        os.close(self._file)

    def _grow(self) -> None:
        size, at = SLOTS_PER_CHUNK * SLOT_BYTES, self._chunks * SLOTS_PER_CHUNK * SLOT_BYTES
        os.posix_fallocate(self._file, at, size)
        chunk = memoryview(mmap.mmap(self._file, size, offset=at))
        self._chunks += 1
        for start in range(size - SLOT_BYTES, -SLOT_BYTES, -SLOT_BYTES):
            numbers, text = chunk[start : start + NUMBERS_BYTES], chunk[start + NUMBERS_BYTES : start + SLOT_BYTES]
            self._free.append(AnswerSlot(numbers.cast("q"), text))


def read_unfinished(path: Path) -> tuple[list[UnfinishedAnswer], int]:
    """Return what is open in the page of a process that died, and the number of slots that are damaged."""
    data = path.read_bytes() if path.exists() else b""
    found: list[UnfinishedAnswer] = []
    damaged = int(len(data) % SLOT_BYTES > 0)
    for start in range(0, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        numbers = memoryview(data)[start : start + NUMBERS_BYTES].cast("q")
        if numbers[STATE] == FREE:
            continue
        if not _is_whole(numbers):
            damaged += 1
            continue
        text = data[start + NUMBERS_BYTES : start + NUMBERS_BYTES + numbers[LENGTH]].decode("utf-8", "ignore")
        started = datetime.fromtimestamp(numbers[STARTED] / 1e6, UTC)
        found.append(
            UnfinishedAnswer(
                format_event_id(numbers[HIGH], numbers[LOW]),
                started,
                numbers[PROMPT],
                numbers[CACHED],
                numbers[TOKENS],
                text.split(_SEPARATOR),
            )
        )
    return found, damaged


def _is_whole(numbers: memoryview[int]) -> bool:
    """Return True if the numbers of an open slot are ones that `AnswerSlot.open` and an engine write."""
    return (
        numbers[STATE] == OPEN
        and numbers[HIGH] >= 0
        and 0 <= numbers[LOW] < 1 << 62
        and EARLIEST <= numbers[STARTED] <= LATEST
        and 0 <= numbers[CACHED] <= numbers[PROMPT] <= MAX_TOKENS
        and 0 <= numbers[TOKENS] <= MAX_TOKENS
        and 0 < numbers[LENGTH] <= SLOT_BYTES - NUMBERS_BYTES
    )
