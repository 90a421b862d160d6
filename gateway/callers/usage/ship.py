"""From the journal to the ledger: as TCP does, with a window, until the ledger says that it has it.

What a sink has accepted may still be lost (a broker's memory). So what the ledger has counts, not what was sent: when
its mark stands still, sending goes back to it, with one batch that grows again as soon as the mark moves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from datetime import datetime
from time import monotonic

from llmops.errors import LlmopsError
from llmops.gateway.callers.usage.base import UsageSink, pause
from llmops.gateway.callers.usage.journal import Journal

log = logging.getLogger(__name__)

BATCH = 500
WINDOW = 100_000
# seconds: between two looks at the ledger while it lacks something, and until it counts as standing still
LOOK = 0.5
# seconds in which events become one transaction, unless there is a whole batch of them before
GATHER = 1.0
PATIENCE, LONGEST_PATIENCE = 10.0, 60.0


class Shipper:
    """Of one journal. `run` until cancelled; `drained` is set while the ledger has all of it, `trouble` says why
    nothing can be shipped now.
    """

    def __init__(
        self, journal: Journal, sink: UsageSink, patience: float = PATIENCE, clock: Callable[[], float] = monotonic
    ) -> None:
        self._journal, self._sink, self._clock = journal, sink, clock
        self._patience = self._waits = patience
        self._next = self._acked = -1
        self._window = BATCH
        self._moved = clock()
        self.trouble = ""
        # of what was read for sending: the number behind a batch, and when its first event was
        self._read: deque[tuple[int, datetime]] = deque()
        self._synced, self._hurried = asyncio.Event(), asyncio.Event()
        self.drained = asyncio.Event()

    def synced(self) -> None:
        """There is more on the disk."""
        self._synced.set()
        if self._acked < self._journal.synced:
            self.drained.clear()
        if self._journal.synced - self._next >= BATCH:
            self._hurried.set()

    def hurry(self) -> None:
        """What is on the disk waits for no more."""
        self._hurried.set()

    @property
    def behind(self) -> int:
        """Events that the ledger is not known to have."""
        return self._journal.next_seq - max(self._acked, self._journal.first_seq)

    def lag(self, now: datetime) -> float:
        """The age in seconds of the oldest event that the ledger is not known to have; 0 without one."""
        return max((now - self._read[0][1]).total_seconds(), 0.0) if self._read else 0.0

    async def run(self) -> None:
        failures = 0
        while True:
            try:
                await self._turn()
            except Exception as error:
                if not isinstance(error, LlmopsError):
                    log.exception("Usage cannot be shipped.")
                self._say(error.message if isinstance(error, LlmopsError) else type(error).__name__)
                await asyncio.sleep(pause(failures))
                failures += 1
            else:
                failures = 0
                self._say("")
                await self._wait()

    async def _turn(self) -> None:
        """Send what the window has room for, and look what has arrived."""
        if self._acked < 0:
            await self._look()
        room = min(BATCH, self._acked + self._window - self._next)
        events = await self._journal.read(self._next, room) if room > 0 else []
        if events:
            if not self._read or self._read[-1][0] <= events[-1].seq:
                self._read.append((events[-1].seq + 1, events[0].at))
            await self._sink.write(events)
            if self._next == self._acked:
                self._moved = self._clock()
            self._next = events[-1].seq + 1
        if self._next > self._acked:
            await self._look()

    async def _look(self) -> None:
        self._note(await self._sink.arrived(self._journal.gateway_id))

    def _note(self, arrived: int) -> None:
        now = self._clock()
        # what is no longer here cannot be sent again
        arrived = max(arrived, self._journal.first_seq)
        if arrived > self._acked:
            self._acked, self._moved, self._waits = arrived, now, self._patience
            self._window = min(2 * self._window, WINDOW)
            self._next = max(self._next, arrived)
            while self._read and self._read[0][0] <= arrived:
                self._read.popleft()
            self._journal.forget(arrived)
        elif self._next > arrived and now - self._moved >= self._waits:
            log.warning("%s: the ledger has nothing after %d; sending it again.", self._journal.gateway_id, arrived)
            self._next, self._window, self._moved = arrived, BATCH, now
            self._waits = min(2 * self._waits, LONGEST_PATIENCE)
        if self._acked >= self._journal.synced:
            self.drained.set()

    async def _wait(self) -> None:
        """Not at all while there is more to send; for a while when something was sent; else for news."""
        if self._next < min(self._journal.synced, self._acked + self._window):
            return
        known = self._journal.synced
        self._synced.clear()
        self._hurried.clear()
        if self._next == self._acked:
            await self._synced.wait()
        else:
            await _heard(self._synced, LOOK)
        if self._journal.synced > known:
            await _heard(self._hurried, GATHER)

    def _say(self, trouble: str) -> None:
        """Once per change."""
        if trouble and not self.trouble:
            log.error("Usage cannot be shipped (%s); the journal keeps it.", trouble)
        elif self.trouble and not trouble:
            log.warning("Usage is shipped again; %d events to go.", self.behind)
        self.trouble = trouble


async def _heard(event: asyncio.Event, seconds: float) -> None:
    """It is set, after so many seconds by us. `wait_for` would swallow a cancellation that comes as it is set (Python
    3.11)."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
