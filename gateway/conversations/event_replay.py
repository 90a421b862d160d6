"""Streams of events that are sent again, and the turns in which they and conversations are rendered.

Events are rendered a few kilobytes at a time: a response can have megabytes, and any number of
clients may ask for the same response at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from time import thread_time
from typing import Any, TypeVar

from llmops.gateway.conversations.response_builder import Event, replay_events
from llmops.gateway.ratelimit.slots import FairSlots

#: Number of bytes after which a piece of a replay is sent.
FLUSH_BYTES = 32 * 1024
#: Pause after each piece of a replay, as a multiple of the CPU time that the piece took. Rendering
#: thus takes at most a quarter of a core, and rendering and sending together a third.
REPLAY_PAUSE = 3.0
_turns = FairSlots(1)
_T = TypeVar("_T")
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


async def render_in_turn(share: str, render: Callable[[], _T]) -> _T:
    """Return what `render` returns: a piece of a replay, or a conversation.

    One piece is rendered at a time, and callers take turns. `share` is the reader's `Caller.share`.
    The next turn begins after the pause, also if this reader leaves meanwhile.
    """
    await _turns.enter(share)
    before = thread_time()
    try:
        return render()
    finally:
        pause = REPLAY_PAUSE * (thread_time() - before)
        asyncio.get_running_loop().call_later(pause, _turns.leave)


async def encode_in_pieces(events: Iterable[Event], share: str) -> AsyncIterator[bytes]:
    """Yield events as server-sent events, many at a time, in the turns of the caller `share`."""
    next_piece = partial(_encode_piece, iter(events))
    while piece := await render_in_turn(share, next_piece):
        yield piece


def _encode_piece(events: Iterator[Event]) -> bytes:
    parts: list[bytes] = []
    size = 0
    for event in events:
        parts.append(_encode_event(event))
        size += len(parts[-1])
        if size >= FLUSH_BYTES:
            break
    return b"".join(parts)


def _encode_event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {_encode(event)}\n\n".encode("utf-8", "replace")
