"""An answer that outlives its connection and can have any number of readers.

An answer keeps its text and the sizes of its deltas, from which a reader renders the events again.
A reader that reconnects with the id of the last event it saw therefore gets the rest, and all
readers get the same events.
"""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import thread_time
from typing import Any, ClassVar, Protocol

from llmops.gateway.conversations.event_replay import FLUSH_BYTES, render_in_turn
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.choice import Choice
from llmops.gateway.generation.parsers.output_processor import OutputDelta, ToolCallDelta, with_text
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.http.sse import EventSource, encode_event
from llmops.gateway.interfaces import TokenBatch, Usage

#: Maximum number of events that a reader renders at a time: a few milliseconds of work.
FLUSH_EVENTS = 256
#: Number of events up to which the first reader of an answer renders them at once. A reader with
#: more events to send replays an answer, and takes turns with the other readers.
LIVE_EVENTS = 16
#: Number of token batches that a replay turns into text at a time: a few milliseconds of work.
REPLAY_TURN = 256
#: Seconds that a reader pauses for each additional reader of its owner. Additional readers are all
#: readers but the first of each answer. They are thus woken at most 100 times a second in total.
READER_PAUSE = 0.01
#: Minimum pause for each additional reader, as a multiple of the CPU time that the reader's last
#: events took. Additional readers thus take at most an eighth of a core in total.
READER_SHARE = 8.0
#: Seconds that a reader waits for the event that it has seen last. An event of another gateway is
#: known here a moment after that gateway's readers have it.
EVENT_TIMEOUT = 1.0
#: Maximum size of a delta in bytes: an AnswerLog stores the size of a delta in two bytes.
_MAX_DELTA_BYTES = 0xFFFF
_EVENT_ID = re.compile(r"([0-9a-f]{6})-(\d{1,9})")


class AnswerLog:
    """The deltas of an answer: one text in UTF-8, and two bytes for the size of each delta.

    Delta `n` is event `n + 1` of the stream; event 0 opens the stream.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._sizes = array("H")
        # For each run of consecutive deltas of one kind: the index of the first delta, and an empty
        # delta of this kind.
        self._starts: list[int] = []
        self._kinds: list[OutputDelta] = []

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        """Return the memory that the deltas take, in bytes."""
        return len(self._text) + 2 * len(self._sizes)

    def append(self, piece: OutputDelta) -> None:
        """Add a delta. A very long delta is split into several."""
        if self._is_new_kind(piece):
            self._starts.append(len(self._sizes))
            self._kinds.append(with_text(piece, ""))
        step = _MAX_DELTA_BYTES // 4  # The longest characters in UTF-8 have four bytes.
        for start in range(0, max(len(piece.text), 1), step):
            data = piece.text[start : start + step].encode("utf-8", "replace")
            self._text += data
            self._sizes.append(len(data))

    def offset(self, delta: int) -> int:
        """Return the offset at which the text of a delta begins, in bytes."""
        return sum(self._sizes[:delta])

    def piece(self, delta: int, offset: int) -> tuple[OutputDelta, int]:
        """Return a delta, and the offset at which the next delta begins.

        Args:
            delta: The index of the delta.
            offset: The offset at which the text of the delta begins, in bytes.
        """
        end = offset + self._sizes[delta]
        text = self._text[offset:end].decode()
        at = bisect_right(self._starts, delta) - 1
        kind = self._kinds[at]
        if isinstance(kind, ToolCallDelta) and self._starts[at] != delta:
            # Only the first delta of a call carries the function's name.
            kind = ToolCallDelta(kind.index)
        return with_text(kind, text), end

    def pieces(self) -> list[OutputDelta]:
        """Return the deltas, with consecutive deltas of one kind merged."""
        found: list[OutputDelta] = []
        begins = 0
        for kind, start, end in zip(self._kinds, self._starts, [*self._starts[1:], len(self._sizes)], strict=False):
            ends = begins + sum(self._sizes[start:end])
            found.append(with_text(kind, self._text[begins:ends].decode()))
            begins = ends
        return found

    def _is_new_kind(self, piece: OutputDelta) -> bool:
        if not self._kinds or type(self._kinds[-1]) is not type(piece):
            return True
        return isinstance(piece, ToolCallDelta) and piece.id is not None


class AnswerFormat(Protocol):
    """An interface to the form in which readers get an answer's events."""

    def read(self, run: AnswerRun, after: int) -> AnswerReader:
        """Return a reader of the events whose number is greater than `after`."""
        ...


class ChunkRenderer(Protocol):
    """A renderer of one answer's events, which makes one event from each delta."""

    def role(self, index: int) -> bytes: ...

    def piece(self, index: int, piece: OutputDelta) -> bytes: ...

    def end(self, run: AnswerRun) -> bytes:
        """Return the events that close the stream, with the finish reason and the usage."""
        ...


class AnswerRun(ABC):
    """An answer that grows, with the readers of its events.

    Attributes:
        id: The id of the answer.
        owner: The owner, who alone may read the answer.
        log: The deltas of the answer.
        format: The form of the events.
        visible: The number of deltas that readers may get; -1 as long as readers must not see the
            answer at all.
        finish: The finish reason; None while the answer runs.
        ended_at: The Unix time of the end; 0 while the answer runs.
        error: The error that ended the answer, as OpenAI's APIs send it; None without an error.
        readers: The current number of readers.
        saved: True once the answer is stored; False if it must not or could not be stored.
        over: True after the end.
        discarded: True if the answer was deleted.
        moved: True if this process does not have the rest of the answer and another gateway may
            have it.
    """

    def __init__(self, run_id: str, owner: str, form: AnswerFormat) -> None:
        self.id, self.owner, self.format = run_id, owner, form
        self.tag = run_id[-6:]
        self.log = AnswerLog()
        self.visible = -1
        self.readers = 0
        self.finish: str | None = None
        self.ended_at = 0
        self.error: dict[str, Any] | None = None
        self.saved = self.over = self.moved = self.discarded = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """Return the tokens used so far."""

    @property
    def status(self) -> str:
        """Return the status of the stored message."""
        if self.finish is None:
            return "in_progress"
        return "completed" if self.finish in ("stop", "tool_calls") else "incomplete"

    @abstractmethod
    async def stop(self) -> None:
        """End the answer now, and wait until the text so far is stored."""

    @abstractmethod
    def enter(self) -> None:
        """Register a reader."""

    @abstractmethod
    def leave(self) -> None:
        """Unregister a reader."""

    def read(self, after: int = -1) -> AnswerReader:
        """Return a reader of the events whose number is greater than `after`."""
        return self.format.read(self, after)

    async def more(self) -> None:
        """Wait until another delta is visible or the answer has ended."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def wake(self) -> None:
        """Wake all readers."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class AnswerReader(EventSource):
    """A reader of an answer's events after a given number.

    A reader that leaves does not stop the answer at once.
    """

    # Number of additional readers by owner: all but the first reader of each answer.
    _others: ClassVar[Counter[str]] = Counter()

    def __init__(self, run: AnswerRun, chunks: ChunkRenderer | None, after: int) -> None:
        """Create a reader of the events whose number is greater than `after`.

        `chunks` is None for a subclass that renders events itself.
        """
        self._run, self._chunks, self._event = run, chunks, after + 1
        self._offset = run.log.offset(max(after, 0))
        self._over = self._left = False
        self._spent, self._cancelled = 0.0, asyncio.Event()
        self._share = run.owner
        run.enter()
        self._is_other = run.readers > 1
        if self._is_other:
            self._others[run.owner] += 1

    async def start(self, context: RequestContext) -> None:
        self._share = context.caller.share

    async def next(self) -> bytes | None:
        run = self._run
        while not self._over:
            if self._spent and run.readers > 1:
                pause = max(READER_PAUSE, READER_SHARE * self._spent)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause * self._others[run.owner]):
                        await self._cancelled.wait()
                    break
            if self._is_other or run.visible - self._event > LIVE_EVENTS:
                data = await render_in_turn(self._share, self._timed)
            else:
                data = self._timed()
            if data:
                return data
            if self._event <= run.visible:
                continue
            if run.moved:
                # End without a last event, so that the reader reconnects and reaches any gateway.
                self._over = True
            elif run.over:
                self._over = True
                return self._last()
            else:
                await run.more()
        return None

    def cancel(self) -> None:
        self._over = True
        self._cancelled.set()
        self.close()
        # Wake `next`, which may wait for an answer that this process does not follow any longer.
        self._run.wake()

    def close(self) -> None:
        if not self._left:
            self._left = True
            self._run.leave()
            if self._is_other:
                self._others[self._run.owner] -= 1
                if not self._others[self._run.owner]:
                    del self._others[self._run.owner]

    def _timed(self) -> bytes:
        if self._over:  # The client left while the reader waited for its turn.
            return b""
        before = thread_time()
        data = self._rendered()
        self._spent = thread_time() - before
        return data

    def _rendered(self) -> bytes:
        run, chunks, parts, size = self._run, self._chunks, [], 0
        assert chunks is not None
        if self._event == 0 and run.visible >= 0:
            parts.append(self._id(0) + chunks.role(0))
            self._event = 1
        while 0 < self._event <= run.visible and size < FLUSH_BYTES and len(parts) < FLUSH_EVENTS:
            piece, self._offset = run.log.piece(self._event - 1, self._offset)
            parts.append(self._id(self._event) + chunks.piece(0, piece))
            size += len(parts[-1])
            self._event += 1
        return b"".join(parts)

    def _id(self, number: int) -> bytes:
        return f"id: {self._run.tag}-{number}\n".encode()

    def _last(self) -> bytes | None:
        """Return the end of the stream, or None if the reader has seen the end already."""
        run, chunks, number = self._run, self._chunks, len(self._run.log) + 1
        assert chunks is not None
        if self._event > number:
            return None
        error = encode_event(json.dumps({"error": run.error}).encode()) if run.error else b""
        return self._id(number) + error + chunks.end(run)


async def last_event_number(text: str | None, run: AnswerRun) -> int:
    """Return the number of the last event that a client saw, or -1 if the client names no event.

    Args:
        text: The client's header `Last-Event-ID`; None without the header.
        run: The answer that the client reads.

    Raises:
        InvalidRequestError: The text is not an event id, or belongs to another stream or to an
            event that was not sent yet.
    """
    if not text:
        return -1
    found = _EVENT_ID.fullmatch(text)
    if found is not None and found[1] == run.tag:
        number = int(found[2])
        with suppress(TimeoutError):
            async with asyncio.timeout(EVENT_TIMEOUT):
                while number > run.visible + int(run.over) and not (run.over or run.moved):
                    await run.more()
        if number <= run.visible + int(run.over):
            return number
    raise InvalidRequestError(
        f"Last-Event-ID '{text[:40]}' is not the id of an event that this stream has sent; leave it out to read the "
        "stream from its beginning.",
        param="Last-Event-ID",
        code="invalid_event_id",
    )


async def replay_batches(
    choice: Choice, batches: Sequence[Sequence[int]], log: AnswerLog, share: str | None = None
) -> None:
    """Turn the tokens of an answer into deltas, and append the deltas to `log`.

    The deltas are the same as those of the gateway that generated the answer, because the batches
    are the same.

    Args:
        choice: The choice of the whole answer, which turns tokens into text.
        batches: The tokens, in the batches in which they arrived.
        log: The log of the answer.
        share: The `Caller.share` in whose turns many tokens are read; None for an answer that this
            gateway continues, which does not wait for readers.
    """

    def feed(start: int) -> None:
        for tokens in batches[start : start + REPLAY_TURN]:
            for piece in choice.sort(choice.feed(TokenBatch(0, tokens))):
                log.append(piece)

    for start in range(0, len(batches), REPLAY_TURN):
        if share is None or len(batches) <= LIVE_EVENTS:
            feed(start)
            await asyncio.sleep(0)
        else:
            await render_in_turn(share, partial(feed, start))
