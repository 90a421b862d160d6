"""From the journal to the ledger: as TCP does, with a window, until the ledger confirms each event.

A sink may lose what it has accepted (a broker's memory), and numbers prove nothing: another writer may have used them,
and a restored snapshot uses them again. So the journal forgets an event when the ledger has that event's id. While the
oldest event is not confirmed, sending goes back to it, with one batch that grows again as soon as events are confirmed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from itertools import islice
from time import monotonic

from llmops.errors import LlmopsError
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.sink import UsageSink, retry_delay

log = logging.getLogger(__name__)

BATCH_SIZE = 500
MAX_WINDOW = 20_000
# events that the ledger is asked for at once
MAX_CONFIRMATIONS = 2000
# seconds: between two looks at the ledger while it lacks something, and until it counts as standing still
CONFIRM_INTERVAL = 0.5
# seconds in which events become one transaction, unless there is a whole batch of them before
BATCH_DELAY = 1.0
RESEND_TIMEOUT, MAX_RESEND_TIMEOUT = 10.0, 60.0


class UsageDelivery:
    """Of one journal. `run` until cancelled; `drained` is set while the ledger has all of it, `trouble` says why
    nothing can be shipped now.
    """

    def __init__(
        self,
        journal: UsageOutbox,
        sink: UsageSink,
        patience: float = RESEND_TIMEOUT,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._journal, self._sink, self._clock = journal, sink, clock
        self._patience = self._waits = patience
        self._next = self._acked = journal.first_seq
        # the ledger may have events before this number already: it is asked before they are sent
        self._sent_before = journal.next_seq
        self._window = 2 * BATCH_SIZE
        self._moved = clock()
        self.trouble = ""
        # what was read for sending and is not confirmed, in the order of the numbers
        self._unconfirmed: dict[int, tuple[str, datetime]] = {}
        self._synced, self._hurried = asyncio.Event(), asyncio.Event()
        self.drained = asyncio.Event()

    def synced(self) -> None:
        """There is more on the disk."""
        self._synced.set()
        if self._acked < self._journal.synced:
            self.drained.clear()
        if self._journal.synced - self._next >= BATCH_SIZE:
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
        oldest = next(iter(self._unconfirmed.values()), None)
        return max((now - oldest[1]).total_seconds(), 0.0) if oldest else 0.0

    async def run(self) -> None:
        failures = 0
        while True:
            try:
                await self._turn()
            except Exception as error:
                if not isinstance(error, LlmopsError):
                    log.exception("Usage cannot be shipped.")
                self._say(error.message if isinstance(error, LlmopsError) else type(error).__name__)
                await asyncio.sleep(retry_delay(failures))
                failures += 1
            else:
                failures = 0
                self._say("")
                await self._wait()

    async def _turn(self) -> None:
        """Send what the window has room for, and ask what has arrived."""
        room = min(BATCH_SIZE, self._acked + self._window - self._next)
        events = await self._journal.read(self._next, room) if room > 0 else []
        if events:
            for event in events:
                self._unconfirmed.setdefault(event.seq, (event.id, event.at))
            there: frozenset[str] = frozenset()
            if events[0].seq < self._sent_before:
                there = await self._sink.confirmed([event.id for event in events])
            missing = [event for event in events if event.id not in there]
            if missing:
                await self._sink.write(missing)
            if self._next == self._acked:
                self._moved = self._clock()
            self._next = events[-1].seq + 1
        if self._next > self._acked:
            await self._look()
        elif self._acked >= self._journal.synced:
            self.drained.set()

    async def _look(self) -> None:
        """Ask for the oldest events, and forget those of them that the ledger has up to the first that it lacks."""
        asked = dict(islice(self._unconfirmed.items(), MAX_CONFIRMATIONS))
        there = await self._sink.confirmed([one for one, _ in asked.values()])
        now, acked = self._clock(), self._acked
        for seq, (one, _) in asked.items():
            if one not in there:
                break
            del self._unconfirmed[seq]
            acked = seq + 1
        if acked > self._acked:
            self._acked, self._moved, self._waits = acked, now, self._patience
            self._window = min(2 * self._window, MAX_WINDOW)
            self._next = max(self._next, acked)
            self._journal.forget(acked)
        elif now - self._moved >= self._waits:
            log.warning("%s: the ledger lacks event %d; sending it again.", self._journal.gateway_id, acked)
            self._sent_before = max(self._sent_before, self._next)
            self._next, self._window, self._moved = acked, BATCH_SIZE, now
            self._waits = min(2 * self._waits, MAX_RESEND_TIMEOUT)
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
            await _wait_at_most(self._synced, CONFIRM_INTERVAL)
        if self._journal.synced > known:
            await _wait_at_most(self._hurried, BATCH_DELAY)

    def _say(self, trouble: str) -> None:
        """Once per change."""
        if trouble and not self.trouble:
            log.error("Usage cannot be shipped (%s); the journal keeps it.", trouble)
        elif self.trouble and not trouble:
            log.warning("Usage is shipped again; %d events to go.", self.behind)
        self.trouble = trouble


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """It is set, after so many seconds by us. `wait_for` would swallow a cancellation that comes as it is set (Python
    3.11)."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
