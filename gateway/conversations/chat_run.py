"""An answer that outlives its connection.

It is generated to its end, stored, and read by any number of readers.

An answer keeps its text and the sizes of its deltas, from which a reader makes the events again. So
a reader who comes back with the id of the last event that it saw gets the rest, and two readers get
the same.

Only the process that generates an answer has it. A store that several processes share would take
the place of `ChatRunRegistry.find` and `AnswerLog`; nothing else here knows where the deltas are.
"""

from __future__ import annotations

import asyncio
import logging
import re
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from llmops.gateway.errors import ApiError, CancelledStreamError, InternalError, InvalidRequestError, log_detail
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta
from llmops.gateway.http.sse import EventSource, openai_error_event
from llmops.gateway.interfaces import Usage

log = logging.getLogger(__name__)

#: Seconds that an answer runs on without a reader: long enough to reload a page or to change the
#: network.
UNREAD_TIMEOUT = 30.0
#: Seconds that an answer which has ended can be read again, and the most answers that are kept for
#: that.
RETENTION_SECONDS, MAX_RETAINED_RUNS = 60.0, 1000
#: Seconds between two writes of an unfinished answer to the store: what a crash of the gateway
#: loses.
SAVE_INTERVAL = 2.0
#: Bytes after which a reader sends what it has rendered.
FLUSH_BYTES = 32 * 1024
#: Bytes of the largest delta: an AnswerLog stores the size of a delta in two bytes.
_MAX_DELTA_BYTES = 0xFFFF
_EVENT_ID = re.compile(r"([0-9a-f]{6})-(\d{1,9})")


class AnswerState(NamedTuple):
    """An answer as it is stored.

    Attributes:
        content: The text.
        items: Reasoning and tool calls as items of the Responses API, empty for a plain text.
        status: `in_progress`, `completed` or `incomplete`.
        finish: The reason of the end: of OpenAI's API, or `cancelled` or `error`.
        usage: The tokens.
    """

    content: str
    items: list[dict[str, Any]]
    status: str
    finish: str | None
    usage: Usage


class ChunkRenderer(Protocol):
    """A renderer of one answer's events."""

    def role(self, index: int) -> bytes: ...

    def piece(self, index: int, piece: OutputDelta) -> bytes: ...

    def end(self, run: ChatRun) -> bytes:
        """Return the reason of the end, the usage, and the events that close the stream."""
        ...


class AnswerLog:
    """The deltas of an answer: one text in UTF-8, and two bytes for the size of each delta.

    Delta `n` is event `n + 1` of the stream; event 0 opens it.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._sizes = array("H")
        # the first delta of each stretch of one kind, and an empty piece of that kind
        self._starts: list[int] = []
        self._kinds: list[OutputDelta] = []

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        """The memory that the deltas take."""
        return len(self._text) + 2 * len(self._sizes)

    def append(self, piece: OutputDelta) -> None:
        """Add a delta; a very long one becomes several."""
        text = piece.arguments if isinstance(piece, ToolCallDelta) else piece.text
        if self._is_new_kind(piece):
            self._starts.append(len(self._sizes))
            self._kinds.append(piece._replace(arguments="") if isinstance(piece, ToolCallDelta) else type(piece)(""))
        step = _MAX_DELTA_BYTES // 4  # of UTF-8's longest characters
        for start in range(0, max(len(text), 1), step):
            data = text[start : start + step].encode("utf-8", "replace")
            self._text += data
            self._sizes.append(len(data))

    def offset(self, delta: int) -> int:
        """Return where the text of a delta begins."""
        return sum(self._sizes[:delta])

    def piece(self, delta: int, offset: int) -> tuple[OutputDelta, int]:
        """Return a delta, whose text begins at `offset`, and where the next one begins."""
        end = offset + self._sizes[delta]
        text = self._text[offset:end].decode()
        at = bisect_right(self._starts, delta) - 1
        kind = self._kinds[at]
        if isinstance(kind, ToolCallDelta):
            # the name goes out with the first delta of a call
            first = self._starts[at] == delta
            return (kind._replace(arguments=text) if first else ToolCallDelta(kind.index, arguments=text)), end
        return type(kind)(text), end

    def pieces(self) -> list[OutputDelta]:
        """Return the stretches of one kind, whole."""
        found: list[OutputDelta] = []
        for at, start in enumerate(self._starts):
            end = self._starts[at + 1] if at + 1 < len(self._starts) else len(self._sizes)
            begins = self.offset(start)
            text = self._text[begins : begins + sum(self._sizes[start:end])].decode()
            kind = self._kinds[at]
            found.append(kind._replace(arguments=text) if isinstance(kind, ToolCallDelta) else type(kind)(text))
        return found

    def _is_new_kind(self, piece: OutputDelta) -> bool:
        if not self._kinds or type(self._kinds[-1]) is not type(piece):
            return True
        return isinstance(piece, ToolCallDelta) and piece.id is not None


class ChatRun:
    """One answer that is being generated.

    Without a reader it is stopped after `UNREAD_TIMEOUT`; `task` ends when it is over and stored.
    """

    def __init__(
        self,
        run_id: str,
        owner: str,
        answer: Answer,
        chunks: ChunkRenderer,
        save: Callable[[AnswerState], Awaitable[bool]] | None,
    ) -> None:
        """Prepare the run of a started answer.

        `save` stores a state, and returns False if that was not possible.
        """
        self.id, self.owner, self.answer, self.chunks = run_id, owner, answer, chunks
        self.tag = run_id[-6:]
        self.log = AnswerLog()
        self.error: ApiError | None = None
        self.finish: str | None = None
        #: True once the answer is stored, False if it is not to be or could not be.
        self.saved = False
        self.over = False
        self._save = save
        self._readers = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._unread: asyncio.TimerHandle | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"chat-{run_id}")
        self._count_readers(0)

    @property
    def status(self) -> str:
        """Return the status of the stored message."""
        if self.finish is None:
            return "in_progress"
        return "completed" if self.finish in ("stop", "tool_calls") else "incomplete"

    def stop(self) -> None:
        """End the answer now; what there is of it is stored."""
        self.answer.cancel()

    def read(self, after: int = -1) -> ChatRunReader:
        """Return a reader of the events after number `after`."""
        return ChatRunReader(self, after)

    def enter(self) -> None:
        """Count a reader."""
        self._count_readers(1)

    def leave(self) -> None:
        """Stop counting a reader."""
        self._count_readers(-1)

    async def more(self) -> None:
        """Wait until there is another delta, or the end."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def state(self) -> AnswerState:
        """Return the present state."""
        pieces = self.log.pieces()
        content = "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta))
        items = [] if all(isinstance(piece, ContentDelta) for piece in pieces) else _items(self.id, pieces, self.status)
        return AnswerState(content, items, self.status, self.finish, self.answer.usage)

    async def _run(self) -> None:
        saving = asyncio.create_task(self._save_now_and_then()) if self._save is not None else None
        try:
            while (delta := await self.answer.next()) is not None:
                pieces = delta.choice.sort(delta.text)
                for piece in pieces:
                    self.log.append(piece)
                if pieces:
                    self._wake()
            self.finish = self.answer.choices[0].finish_reason
        except CancelledStreamError:
            self.finish = "cancelled"
        except ApiError as error:
            log_detail(error)
            self.finish, self.error = "error", error
        except Exception:
            log.exception("The answer %s failed.", self.id)
            self.finish, self.error = "error", InternalError("The gateway failed in the middle of the answer.")
        finally:
            if saving is not None:
                saving.cancel()
                await asyncio.gather(saving, return_exceptions=True)
            self.answer.close()
            self.finish = self.finish or "cancelled"
            self.saved = await self._stored()
            # readers see the end only now, as it says whether the answer is stored
            self.over = True
            if self._unread is not None:
                self._unread.cancel()
            self._wake()

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_INTERVAL)
            await self._stored()

    async def _stored(self) -> bool:
        if self._save is None:
            return False
        try:
            return await self._save(self.state())
        except ApiError as error:
            log.warning("The answer %s was not stored: %s", self.id, error.full_message)
            return False

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _count_readers(self, change: int) -> None:
        self._readers += change
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if not self._readers and not self.over:
            self._unread = asyncio.get_running_loop().call_later(UNREAD_TIMEOUT, self.stop)


class ChatRunReader(EventSource):
    """The events of a run from some number on. A reader who leaves stops nothing at once."""

    def __init__(self, run: ChatRun, after: int) -> None:
        self._run, self._event = run, after + 1
        self._offset = run.log.offset(max(after, 0))
        self._over = self._left = False
        run.enter()

    async def next(self) -> bytes | None:
        run = self._run
        while not self._over:
            if data := self._rendered():
                return data
            if run.over:
                self._over = True
                if self._event > len(run.log) + 1:
                    return None  # the reader has seen the end
                return self._id(len(run.log) + 1) + self._last()
            await run.more()
        return None

    def cancel(self) -> None:
        self._over = True
        self.close()

    def close(self) -> None:
        if not self._left:
            self._left = True
            self._run.leave()

    def _rendered(self) -> bytes:
        run, parts, size = self._run, [], 0
        if self._event == 0:
            parts.append(self._id(0) + run.chunks.role(0))
            self._event = 1
        while self._event <= len(run.log) and size < FLUSH_BYTES:
            piece, self._offset = run.log.piece(self._event - 1, self._offset)
            parts.append(self._id(self._event) + run.chunks.piece(0, piece))
            size += len(parts[-1])
            self._event += 1
        return b"".join(parts)

    def _id(self, number: int) -> bytes:
        return f"id: {self._run.tag}-{number}\n".encode()

    def _last(self) -> bytes:
        run = self._run
        return (openai_error_event(run.error) if run.error is not None else b"") + run.chunks.end(run)


class ChatRunRegistry:
    """The runs of this process, by id: those in progress, and those that ended a moment ago."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, ChatRun] = OrderedDict()

    def add(self, run: ChatRun) -> None:
        self._runs[run.id] = run
        run.task.add_done_callback(lambda _: self._ended(run))

    def find(self, run_id: str) -> ChatRun | None:
        return self._runs.get(run_id)

    async def close(self) -> None:
        """Stop all runs and wait until they are stored."""
        running = [run for run in self._runs.values() if not run.over]
        for run in running:
            run.stop()
        await asyncio.gather(*(run.task for run in running), return_exceptions=True)

    def _ended(self, run: ChatRun) -> None:
        asyncio.get_running_loop().call_later(RETENTION_SECONDS, self._forget, run)
        ended = [one.id for one in self._runs.values() if one.over] if len(self._runs) > MAX_RETAINED_RUNS else []
        for run_id in ended[: len(self._runs) - MAX_RETAINED_RUNS]:
            del self._runs[run_id]

    def _forget(self, run: ChatRun) -> None:
        if self._runs.get(run.id) is run:
            del self._runs[run.id]


def parse_last_event_id(text: str | None, run: ChatRun) -> int:
    """Return the number of the last event that a client says it saw, or -1 if it names none.

    Raises:
        InvalidRequestError: The text is no id of an event, or the id of another stream or of an
            event yet to come.
    """
    if not text:
        return -1
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        problem = "is not the id of an event"
    elif found[1] != run.tag:
        problem = "is the id of an event of another stream"
    elif int(found[2]) > len(run.log) + int(run.over):
        problem = "is the id of an event that was not sent yet"
    else:
        return int(found[2])
    raise InvalidRequestError(
        f"Last-Event-ID '{text[:40]}' {problem}; leave it out to read the stream from its beginning.",
        param="Last-Event-ID",
        code="invalid_event_id",
    )


def _items(run_id: str, pieces: list[OutputDelta], status: str) -> list[dict[str, Any]]:
    """Return the pieces as items of the Responses API."""
    items: list[dict[str, Any]] = []
    suffix = run_id.removeprefix("chatcmpl-")
    for at, piece in enumerate(pieces):
        if isinstance(piece, ContentDelta):
            content = [{"type": "output_text", "text": piece.text, "annotations": [], "logprobs": []}]
            item: dict[str, Any] = {"type": "message", "id": "msg", "role": "assistant", "content": content}
        elif isinstance(piece, ReasoningDelta):
            content = [{"type": "reasoning_text", "text": piece.text}]
            item = {"type": "reasoning", "id": "rs", "summary": [], "content": content}
        else:
            item = {"type": "function_call", "id": "fc", "call_id": piece.id, "name": piece.name}
            item["arguments"] = piece.arguments
        last = at == len(pieces) - 1
        items.append({**item, "id": f"{item['id']}_{suffix}_{at}", "status": status if last else "completed"})
    return items
