"""Typed events as a stream: written, followed while they are made, or sent again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

from llmops.gateway.conversations.builder import Event
from llmops.gateway.http.events import EventSource


def written(events: Iterable[Event]) -> bytes:
    """Server-sent events with their type as the event's name, as OpenAI sends them."""
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(
            "utf-8", "replace"
        )
        for event in events
    )


class Followed(EventSource):
    """Events that somebody else makes. A reader who leaves changes nothing for the others."""

    def __init__(self, past: bytes) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._over = False
        if past:
            self.put(past)

    def put(self, data: bytes) -> None:
        self._queue.put_nowait(data)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def next(self) -> bytes | None:
        data = None if self._over else await self._queue.get()
        self._over = data is None
        return data

    def cancel(self) -> None:
        self._over = True
        self.end()

    def close(self) -> None:
        self._over = True
