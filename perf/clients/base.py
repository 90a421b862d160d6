"""The interface between the runner and a protocol."""

from __future__ import annotations

from typing import Protocol

from llmops.perf.records import Record, Request


class Client(Protocol):
    """Sends requests to one server. One instance serves any number of requests at a time."""

    async def send(self, request: Request, start: float | None = None) -> Record:
        """Send and wait for the end. Never raises for what the server does: that is in the record.

        `start` is when the clock began (seconds, `time.perf_counter`), now if it is None.
        """
        ...

    async def close(self) -> None: ...
