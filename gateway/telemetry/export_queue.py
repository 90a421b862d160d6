"""A queue from which a thread exports telemetry in batches, off the event loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Maximum number of items in a batch, which bounds the size of one request to the receiver.
MAX_BATCH = 256


class ExportQueue(Generic[T]):
    """A bounded queue that a thread drains in batches.

    `put` never blocks: items that do not fit are dropped and counted. Only one thread may call
    `put`.
    """

    def __init__(self, name: str, deliver: Callable[[Sequence[T]], None], room: int, period: float) -> None:
        """Create a queue.

        Args:
            name: Name of the exported data in log lines.
            deliver: Delivers a batch. If it raises an exception, the batch is lost.
            room: Maximum number of waiting items.
            period: Seconds for which items are collected before they are delivered.
        """
        self.delivered = 0
        self._name, self._deliver, self._room, self._period = name, deliver, room, period
        self._items: deque[T] = deque()
        # `put` writes the first counter and the thread the second, so that neither needs a lock
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
        # wake the thread once per period instead of once per item
        if not self._some.is_set():
            self._some.set()

    def close(self, seconds: float) -> None:
        """Deliver the waiting items and stop. Items that take longer than `seconds` are lost."""
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
                    "%s: records cannot be exported (%s); they are dropped and counted until the receiver works again",
                    self._name,
                    error,
                )
            self._works = False
            return
        self.delivered += len(batch)
        if not self._works:
            log.info("%s: records are exported again; %d were dropped", self._name, self.dropped)
        self._works = True
