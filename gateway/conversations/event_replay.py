"""Streams of typed events that are sent again from the store.

Events are rendered as fast as the client reads them, a few kilobytes at a time: a response can have
megabytes, and any number of clients may ask for the same response at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from llmops.gateway.conversations.response_builder import Event, replay_events

# Number of bytes after which a piece of a replay is sent.
FLUSH_BYTES = 32 * 1024
#: The encoder of events, which `json.dumps` would create for each of them.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
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


async def encode_in_pieces(events: Iterable[Event]) -> AsyncIterator[bytes]:
    """Yield events as server-sent events, many at a time."""
    parts: list[bytes] = []
    size = 0
    for event in events:
        parts.append(_encode_event(event))
        size += len(parts[-1])
        if size >= FLUSH_BYTES:
            yield b"".join(parts)
            # The client may read as fast as this is written; other requests have their turn.
            await asyncio.sleep(0)
            parts, size = [], 0
    yield b"".join(parts)


def _encode_event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {_encode(event)}\n\n".encode("utf-8", "replace")
