"""The page: what every open answer has used so far, in a file that outlives this process.

A slot is numbers and a text. A number is written with every message of the engine; that is one store to memory which
the system keeps when the process is killed. A slot that is not free when a process finds it belonged to one that died.
"""

from __future__ import annotations

import mmap
import os
from datetime import datetime, timezone
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from llmops.gateway.callers.usage.events import id_text

SLOT, NUMBERS = 1024, 64
CHUNK = 256
STATE, HIGH, LOW, STARTED, PROMPT, CACHED, TOKENS, LENGTH = range(8)
FREE, OPEN = 0, 1
_BEHIND_STATE, _BUT_STATE = 8, Struct("=7q")
# Tokens that no request has, and times (microseconds since 1970) at which none began: 2001 and 2200.
MOST_TOKENS = 2**31 - 1
EARLIEST, LATEST = 10**15, 7_258_118_400_000_000
_SEPARATOR = "\x1f"


class Left(NamedTuple):
    """What an answer had used when its process died. `texts` as they were given to `open`."""

    id: str
    started: datetime
    prompt: int
    cached: int
    tokens: int
    texts: list[str]


class Slot:
    """The place of one answer. `numbers` can be written without a call."""

    __slots__ = ("numbers", "text")

    def __init__(self, numbers: memoryview, text: memoryview) -> None:
        self.numbers, self.text = numbers, text

    def open(self, event_id: tuple[int, int], started: int, prompt: int, texts: list[str]) -> None:
        """`started`: microseconds since 1970."""
        data = _SEPARATOR.join(texts).encode("utf-8", "replace")[: SLOT - NUMBERS]
        self.text[: len(data)] = data
        high, low = event_id
        _BUT_STATE.pack_into(self.numbers, _BEHIND_STATE, high, low, started, prompt, 0, 0, len(data))
        # only now does it count
        self.numbers[STATE] = OPEN


class Page:
    """All slots of one worker. Grows in chunks, whose room on the disk is taken first: a full disk would kill the
    process when it writes to memory that has none.
    """

    def __init__(self, path: Path) -> None:
        """Empties what is there. Raises OSError when there is no room."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, 0)
        self._chunks = 0
        self._free: list[Slot] = []
        try:
            self._grow()
        except OSError:
            os.close(self._file)
            raise

    def take(self) -> Slot | None:
        """A free slot, None where there is no room for another."""
        if not self._free:
            try:
                self._grow()
            except OSError:
                return None
        return self._free.pop()

    def give(self, slot: Slot) -> None:
        slot.numbers[STATE] = FREE
        self._free.append(slot)

    def close(self) -> None:
        """The file stays, with what is open in it; slots that are still in use can be written to."""
        os.close(self._file)

    def _grow(self) -> None:
        size, at = CHUNK * SLOT, self._chunks * CHUNK * SLOT
        os.posix_fallocate(self._file, at, size)
        chunk = memoryview(mmap.mmap(self._file, size, offset=at))
        self._chunks += 1
        for start in range(size - SLOT, -SLOT, -SLOT):
            numbers, text = chunk[start : start + NUMBERS], chunk[start + NUMBERS : start + SLOT]
            self._free.append(Slot(numbers.cast("q"), text))


def left_in(path: Path) -> tuple[list[Left], int]:
    """Return what is open in the page of a process that died, and the number of slots that are damaged."""
    data = path.read_bytes() if path.exists() else b""
    found: list[Left] = []
    damaged = int(len(data) % SLOT > 0)
    for start in range(0, len(data) - SLOT + 1, SLOT):
        numbers = memoryview(data)[start : start + NUMBERS].cast("q")
        if numbers[STATE] == FREE:
            continue
        if not _is_whole(numbers):
            damaged += 1
            continue
        text = data[start + NUMBERS : start + NUMBERS + numbers[LENGTH]].decode("utf-8", "ignore")
        started = datetime.fromtimestamp(numbers[STARTED] / 1e6, timezone.utc)
        found.append(
            Left(
                id_text(numbers[HIGH], numbers[LOW]),
                started,
                numbers[PROMPT],
                numbers[CACHED],
                numbers[TOKENS],
                text.split(_SEPARATOR),
            )
        )
    return found, damaged


def _is_whole(numbers: memoryview[int]) -> bool:
    """Return True if the numbers of an open slot are ones that `Slot.open` and an engine write."""
    return (
        numbers[STATE] == OPEN
        and numbers[HIGH] >= 0
        and 0 <= numbers[LOW] < 1 << 62
        and EARLIEST <= numbers[STARTED] <= LATEST
        and 0 <= numbers[CACHED] <= numbers[PROMPT] <= MOST_TOKENS
        and 0 <= numbers[TOKENS] <= MOST_TOKENS
        and 0 < numbers[LENGTH] <= SLOT - NUMBERS
    )
