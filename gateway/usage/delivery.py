"""Delivery of an outbox to the ledger.

An event is deleted when the ledger confirms its id, and sent again until then.

A sink may lose events that it has accepted (in a broker's memory), and an event's number proves
nothing: a restored snapshot gives it again. Only the id says that the ledger has the event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from time import monotonic

from llmops.errors import LlmopsError
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.sink import UsageSink, retry_delay

log = logging.getLogger(__name__)

#: Events that are sent at once.
BATCH_SIZE = 500
#: Events that may be sent and not confirmed. The ledger reports gaps above a multiple of this as an
#: error.
MAX_UNCONFIRMED = 20_000
#: Event ids that the ledger is asked for at once.
MAX_CONFIRMATIONS = 2000
#: Seconds between two batches that are not full: events of a second are one transaction of the
#: ledger.
BATCH_DELAY = 1.0
#: Seconds until an event that the ledger does not confirm is sent again, and the longest such wait.
RESEND_TIMEOUT, MAX_RESEND_TIMEOUT = 10.0, 60.0


class UsageDelivery:
    """The delivery of one outbox to its sink.

    `trouble` says why events cannot be delivered now; it is empty otherwise.
    """

    def __init__(
        self,
        outbox: UsageOutbox,
        sink: UsageSink,
        resend_timeout: float = RESEND_TIMEOUT,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._outbox, self._sink, self._clock = outbox, sink, clock
        self._resend_timeout = self._resend_after = resend_timeout
        #: The place of the last event that was sent, and the number of events up to it that are not
        #: confirmed.
        self._cursor = self._unconfirmed = 0
        #: Events up to this place may have been sent before: the ledger is asked before they are
        #: sent.
        self._sent_before = outbox.last_place
        #: The place of the first event that is not confirmed, and the time when that last changed.
        self._first, self._progress_at = 0, clock()
        self._stalled = False
        self._hurry = asyncio.Event()
        self._drained = asyncio.Event()
        self.trouble = ""

    @property
    def behind(self) -> int:
        """The number of events that the ledger has not confirmed and can be sent."""
        return self._outbox.count - len(self._outbox.damaged)

    def lag(self, now: datetime) -> float:
        """Return the age in seconds of the oldest event that the ledger has not confirmed.

        Return 0 if the ledger has confirmed all events.
        """
        oldest = self._outbox.oldest()
        return max((now - oldest).total_seconds(), 0.0) if oldest else 0.0

    async def drain(self) -> None:
        """Wait until the ledger has confirmed all events. Batches are not delayed meanwhile."""
        while self.behind:
            self._drained.clear()
            self._hurry.set()
            await self._drained.wait()

    async def run(self) -> None:
        """Deliver until cancelled."""
        failures = 0
        while True:
            try:
                delay = 0.0 if await self.deliver() else BATCH_DELAY
            except Exception as error:
                if not isinstance(error, LlmopsError):
                    log.exception("Usage cannot be delivered.")
                self._report(error.message if isinstance(error, LlmopsError) else type(error).__name__)
                delay = retry_delay(failures)
                failures += 1
                self._hurry.clear()
            else:
                failures = 0
                self._report("")
            if delay:
                await self._pause(delay)

    async def deliver(self) -> bool:
        """Send one batch, and delete what the ledger confirms.

        Return True if there is more to do now.
        """
        window = BATCH_SIZE if self._stalled else MAX_UNCONFIRMED
        room = min(BATCH_SIZE, window - self._unconfirmed)
        rows = await self._outbox.read(self._cursor, room) if room > 0 else []
        if rows:
            known: frozenset[str] = frozenset()
            if rows[0].place <= self._sent_before:
                known = await self._sink.confirmed([row.event.id for row in rows])
            missing = [row.event for row in rows if row.event.id not in known]
            if missing:
                await self._sink.write(missing)
            if not self._unconfirmed:
                self._progress_at = self._clock()
            self._cursor = rows[-1].place
            self._unconfirmed += len(rows)
        progress = False
        if self._unconfirmed:
            # The usual case needs no look into the file: the batch is all that is unconfirmed.
            is_all = self._unconfirmed == len(rows)
            progress = await self._confirm({row.event.id: row.place for row in rows} if is_all else None)
        if not self.behind:
            self._drained.set()
        return len(rows) == BATCH_SIZE or (progress and self._unconfirmed > 0)

    async def _confirm(self, places: dict[str, int] | None) -> bool:
        """Delete the oldest events that the ledger has, or send them again.

        Return True if some were deleted.
        """
        if places is None:
            places = await self._outbox.ids(self._cursor, MAX_CONFIRMATIONS)
        known = await self._sink.confirmed(list(places))
        confirmed = [place for event_id, place in places.items() if event_id in known]
        if confirmed:
            self._outbox.delete(confirmed)
            self._unconfirmed -= len(confirmed)
            self._stalled = False
        first = next((place for event_id, place in places.items() if event_id not in known), self._cursor + 1)
        now = self._clock()
        if first > self._first:
            self._first, self._progress_at, self._resend_after = first, now, self._resend_timeout
        elif now - self._progress_at >= self._resend_after:
            log.warning("The ledger has not confirmed %d events; they are sent again.", self._unconfirmed)
            self._sent_before = max(self._sent_before, self._cursor)
            self._cursor = self._unconfirmed = 0
            self._stalled, self._progress_at = True, now
            self._resend_after = min(2 * self._resend_after, MAX_RESEND_TIMEOUT)
        return bool(confirmed)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        self._hurry.clear()

    def _report(self, trouble: str) -> None:
        """Log a trouble once, and once that it is over."""
        if trouble and not self.trouble:
            log.error("Usage cannot be delivered (%s); the outbox keeps it.", trouble)
        elif self.trouble and not trouble:
            log.warning("Usage is delivered again; %d events are waiting.", self.behind)
        self.trouble = trouble
