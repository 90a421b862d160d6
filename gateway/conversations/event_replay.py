"""Streams of typed events that are sent again from the store.

Events are rendered as fast as the client reads them, a few kilobytes at a time: a response can have
megabytes, and any number of clients may ask for the same response at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

from llmops.gateway.conversations.response_builder import Event, replay_events
from llmops.gateway.conversations.response_store import ResponseStore, StoredResponse
from llmops.gateway.errors import ApiError, log_detail
from llmops.gateway.http.sse import EventSource

# Number of bytes after which a piece of a replay is sent.
FLUSH_BYTES = 32 * 1024
# Seconds between two polls of a response that another gateway generates: longer than with Redis,
# because each poll reads the store.
POLL_INTERVAL = 0.5
RESPONSE_GONE = (
    "This response ends because a client deleted it, or because its row in the store is lost, as after a restored "
    "backup; create the response again."
)


def encode_events(events: Iterable[Event]) -> bytes:
    """Render events as server-sent events whose name is the event's type, as OpenAI sends them."""
    return b"".join(map(_encode_event, events))


def events_after(number: int, response: dict[str, Any], cuts: list[list[int]]) -> Iterator[Event]:
    """Yield the events of a response whose sequence number is greater than `number`.

    `cuts` has the sizes of each output item's deltas, in characters.
    """
    return (event for event in replay_events(response, cuts) if event["sequence_number"] > number)


class ReplayEventStream(EventSource):
    """A stream of events that are already known."""

    def __init__(self, past: Iterable[Event]) -> None:
        self._past = iter(past)
        self._over = False

    async def next(self) -> bytes | None:
        return None if self._over else self._piece()

    def cancel(self) -> None:
        self._over = True

    def close(self) -> None:
        self._over = True

    def _piece(self) -> bytes | None:
        """Render the next events, at least one; return None after the last event."""
        parts: list[bytes] = []
        size = 0
        for event in self._past:
            parts.append(_encode_event(event))
            size += len(parts[-1])
            if size >= FLUSH_BYTES:
                break
        return b"".join(parts) or None


class PolledEventStream(ReplayEventStream):
    """A stream of events of another gateway's response, for deployments without Redis.

    The events are read from the store as the response grows.
    """

    def __init__(self, store: ResponseStore, entry: StoredResponse, after: int) -> None:
        self._store, self._id, self._owner = store, entry.id, entry.owner
        self._after, self._running = after, entry.running
        super().__init__(self._new(entry))

    async def next(self) -> bytes | None:
        while not self._over:
            piece = self._piece()
            if piece is not None:
                return piece
            if not self._running:
                break
            await asyncio.sleep(POLL_INTERVAL)
            await self._look()
        return None

    async def _look(self) -> None:
        try:
            row = await self._store.find(self._id, self._owner)
        except ApiError as error:
            log_detail(error)
            return
        self._running = row is not None and row.running
        if row is not None:
            self._past = iter(self._new(row.decoded()))
        else:
            gone = {"code": "server_error", "message": RESPONSE_GONE, "param": None}
            self._past = iter([{"type": "error", **gone, "sequence_number": self._after + 1}])

    def _new(self, entry: StoredResponse) -> list[Event]:
        events = list(events_after(self._after, entry.response, entry.cuts))
        self._after = max([self._after, *(event["sequence_number"] for event in events)])
        return events


def _encode_event(event: Event) -> bytes:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode("utf-8", "replace")
