"""The delivery of an outbox to the ledger.

An event is deleted when the ledger confirms its id, and is sent again until then. A sink may lose
events that it has accepted (in a broker's memory). An event's number does not prove that the ledger
has the event, because a restored snapshot assigns the same number again. Only the event's id proves
this.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from time import monotonic

from llmops.errors import LlmopsError
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.sink import UsageSink, retry_delay

log = logging.getLogger(__name__)

#: Events in one batch, which is one transaction of the ledger.
BATCH_SIZE = 500
#: Maximum number of events sent and not yet confirmed, which bounds how many are sent again. Far
#: below the ledger's MAX_SEQUENCE_LEAD: the ledger does not look for missing events after a larger
#: jump of their numbers.
MAX_UNCONFIRMED = 20_000
#: Maximum number of event ids in one query of the ledger.
MAX_CONFIRMATIONS = 2000
#: Seconds between two batches that are not full, so that the events of a second are one transaction
#: of the ledger.
BATCH_DELAY = 1.0
#: Seconds until an unconfirmed event is sent again. The time doubles with each repetition.
RESEND_TIMEOUT = 10.0
#: Maximum seconds until an unconfirmed event is sent again, after any number of repetitions.
MAX_RESEND_TIMEOUT = 60.0


class UsageDelivery:
    """The delivery of one outbox to its sink.

    Attributes:
        trouble: The reason why events cannot be delivered now; empty if they can.
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
        #: The place of the last event sent, and the number of unconfirmed events up to this place.
        self._cursor = self._unconfirmed = 0
        #: The place of the first unconfirmed event, and the time when this place last changed.
        self._first, self._progress_at = 0, clock()
        self._stalled = False
        self._hurry = asyncio.Event()
        self._drained = asyncio.Event()
        self.trouble = ""

    @property
    def behind(self) -> int:
        """Return the number of readable events that the ledger has not confirmed."""
        return self._outbox.count - len(self._outbox.damaged)

    def lag(self, now: datetime) -> float:
        """Return the age in seconds of the oldest event that the ledger has not confirmed.

        Return 0 if the ledger has confirmed all events.
        """
        oldest = self._outbox.oldest()
        return max((now - oldest).total_seconds(), 0.0) if oldest else 0.0

    async def drain(self) -> None:
        """Wait until the ledger has confirmed all events.

        Until then, batches are sent without delay.
        """
        while self.behind:
            self._drained.clear()
            self._hurry.set()
            await self._drained.wait()

    async def run(self) -> None:
        """Deliver events until the task is cancelled."""
        failures = 0
        while True:
            try:
                delay = 0.0 if await self.deliver() else BATCH_DELAY
            except Exception as error:
                if isinstance(error, LlmopsError):
                    self._report(error.message)
                elif isinstance(error, sqlite3.OperationalError):
                    self._report(f"the outbox: {error}")
                else:
                    log.exception("Usage cannot be delivered because of an unexpected error; the delivery is retried.")
                    self._report(type(error).__name__)
                delay = retry_delay(failures)
                failures += 1
                self._hurry.clear()
            else:
                failures = 0
                self._report("")
            if delay:
                await self._pause(delay)

    async def deliver(self) -> bool:
        """Send one batch, and delete the events that the ledger has confirmed.

        Return True if the next batch should follow at once.
        """
        window = BATCH_SIZE if self._stalled else MAX_UNCONFIRMED
        room = min(BATCH_SIZE, window - self._unconfirmed)
        rows = await self._outbox.read(self._cursor, room) if room > 0 else []
        if rows:
            await self._sink.write([row.event for row in rows])
            if not self._unconfirmed:
                self._progress_at = self._clock()
            self._cursor = rows[-1].place
            self._unconfirmed += len(rows)
        progress = self._unconfirmed > 0 and await self._confirm()
        if not self.behind:
            self._drained.set()
        return len(rows) == BATCH_SIZE or (progress and self._unconfirmed > 0)

    async def _confirm(self) -> bool:
        """Delete the oldest events that the ledger has, or schedule them to be sent again.

        Return True if events were deleted.
        """
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
            log.warning(
                "The ledger has not confirmed %d usage events; the gateway sends them again.", self._unconfirmed
            )
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
        """Log the start of a failure once, and the end of the failure once.

        `trouble` is the reason of the failure, empty without a failure.
        """
        if trouble and not self.trouble:
            log.error("Usage cannot be delivered (%s); the outbox keeps it, and the delivery is retried.", trouble)
        elif self.trouble and not trouble:
            log.warning("Usage is delivered again; %d events are waiting.", self.behind)
        self.trouble = trouble
