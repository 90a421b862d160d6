"""Export of telemetry off the event loop, in batches by a thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Items that are delivered together.
MAX_BATCH = 256


class ExportQueue(Generic[T]):
    """A bounded queue that a thread drains in batches.

    `put` never blocks: items that do not fit are dropped and counted. Only one thread may call it.
    """

    def __init__(self, name: str, deliver: Callable[[Sequence[T]], None], room: int, period: float) -> None:
        """Create a queue.

        Args:
            name: Name for the log.
            deliver: Delivers a batch; an exception means that the batch is lost.
            room: Items that may wait.
            period: Seconds over which items are collected.
        """
        self.delivered = 0
        self._name, self._deliver, self._room, self._period = name, deliver, room, period
        self._items: deque[T] = deque()
        # each is written by one of the two threads
        self._refused = self._lost = 0
        self._some, self._closing, self._works = Event(), Event(), True
        self._thread = Thread(target=self._run, name=name, daemon=True)

    @property
    def dropped(self) -> int:
        return self._refused + self._lost

    def start(self) -> None:
        self._thread.start()

    def put(self, item: T) -> None:
        if len(self._items) >= self._room:
            self._refused += 1
            return
        self._items.append(item)
        # one wake-up per period, not per item
        if not self._some.is_set():
            self._some.set()

    def close(self, seconds: float) -> None:
        """Deliver the waiting items within `seconds`, and stop."""
        self._closing.set()
        self._some.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._some.wait()
            self._closing.wait(self._period)
            self._some.clear()
            while self._items:
                self._send([self._items.popleft() for _ in range(min(len(self._items), MAX_BATCH))])

    def _send(self, batch: Sequence[T]) -> None:
        try:
            self._deliver(batch)
        except Exception as error:  # noqa: BLE001  no exception may affect requests
            self._lost += len(batch)
            if self._works:
                log.warning(
                    "%s cannot be exported (%s) and is dropped and counted until the export works again",
                    self._name,
                    error,
                )
            self._works = False
            return
        self.delivered += len(batch)
        if not self._works:
            log.info("%s is exported again; %d were dropped", self._name, self.dropped)
        self._works = True
