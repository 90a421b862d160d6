"""An answer that this process generates to its end and stores, with or without readers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from llmops.gateway.conversations.answer_run import AnswerFormat, AnswerLog, AnswerRun
from llmops.gateway.conversations.event_replay import RESPONSE_GONE
from llmops.gateway.errors import ApiError, CancelledStreamError, GoneError, InternalError, UnavailableError, log_detail
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputDelta, ReasoningDelta
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Usage, UsageOwner
from llmops.gateway.logging_setup import request_logger

if TYPE_CHECKING:
    from llmops.gateway.conversations.checkpoints import AnswerCheckpoint

log = request_logger(__name__)

#: Seconds that an answer runs on without a reader: long enough to reload a page or to change
#: networks.
UNREAD_TIMEOUT = 30.0
#: Seconds for which an ended answer can still be read: long enough for a reader to reconnect.
RETENTION_SECONDS = 60.0
#: Maximum number of answers in memory. Beyond it, ended answers are dropped, beginning with the
#: oldest answer of the owner who has the most answers.
MAX_RETAINED_RUNS = 1000
#: Seconds between two writes of an unfinished answer to the store. A crash of the gateway loses the
#: text of this time.
SAVE_INTERVAL = 2.0
#: Seconds for which the end of a background response waits for an unavailable store. Long, because
#: no client may have seen the response yet.
MAX_STORE_OUTAGE = 300.0


class AnswerState(NamedTuple):
    """The state of an answer as it is stored.

    Attributes:
        content: The text.
        items: Reasoning and tool calls as items of the Responses API; empty for a plain text.
        status: The status: `in_progress`, `completed` or `incomplete`.
        finish: The finish reason of OpenAI's API, or `cancelled` or `error`; None while the answer
            runs.
        usage: The tokens used so far.
    """

    content: str
    items: list[dict[str, Any]]
    status: str
    finish: str | None
    usage: Usage


class EndedAnswer(BaseModel):
    """The end of an answer, as other gateways read it from Redis."""

    finish: str
    usage: Usage
    saved: bool
    ended_at: int
    error: dict[str, Any] | None

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class ChatRun(AnswerRun):
    """One answer that this process generates.

    Without a reader, the answer is stopped after `UNREAD_TIMEOUT` seconds, unless it runs in the
    background. `task` ends when the answer is over and stored.

    With a checkpoint, readers get only tokens that Redis has, and another gateway may take the
    answer over.
    """

    def __init__(
        self,
        run_id: str,
        answer: Answer,
        form: AnswerFormat,
        context: RequestContext,
        save: Callable[[ChatRun], Awaitable[bool]] | None = None,
        checkpoint: AnswerCheckpoint | None = None,
        log: AnswerLog | None = None,
        background: bool = False,
    ) -> None:
        """Start to generate an answer.

        Args:
            run_id: The id of the answer.
            answer: The answer; not started yet if `background` is True.
            form: The form of the answer's events.
            context: The context of the request that began the answer.
            save: Stores the current state, and returns False on failure. None for an answer that is
                not stored.
            checkpoint: The checkpoint of the answer in Redis; None without Redis.
            log: The deltas of a gateway that generated the beginning.
            background: True if the answer runs on without a reader.
        """
        super().__init__(run_id, context.caller.owner, form)
        self.answer, self.log, self._background = answer, log or AnswerLog(), background
        self.failure: ApiError | None = None
        self._context, self._save, self._checkpoint = context, save, checkpoint
        self._is_read_elsewhere = False
        self._unread: asyncio.TimerHandle | None = None
        # Pairs of the checkpoint's size in bytes and the log's length at that time.
        self._marks: deque[tuple[int, int]] = deque()
        self._offered, self._is_taken_over = False, log is not None
        self._closing = self._is_store_away = False
        self._writing: asyncio.Task[bool] | None = None
        if checkpoint is not None:
            self._marks.append((checkpoint.size, len(self.log)))
            checkpoint.on_change = self._on_checkpoint
            if context.usage_recorder is not None and checkpoint.registered:
                context.usage_recorder.hold()
        self._show()
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"chat-{run_id}")
        self._schedule_stop()
        if checkpoint is not None:
            self._on_checkpoint()

    @property
    def usage(self) -> Usage:
        return self.answer.usage

    @property
    def group(self) -> str:
        return self._context.caller.group

    async def stop(self) -> None:
        self.answer.cancel()
        await self.task

    def discard(self) -> None:
        """End the answer now, and store nothing more. Readers receive an error."""
        self.discarded, self._save = True, None
        self.failure = GoneError(RESPONSE_GONE)
        self.answer.cancel()

    def offer(self) -> None:
        """Stop generating, and leave the rest to another gateway or to this gateway's next process.

        An answer without a checkpoint in Redis is stopped for good.
        """
        self._closing = True
        self._offered = self._checkpoint is not None and self._checkpoint.holds
        error = UnavailableError("The gateway shut down before the answer began; send the request again.")
        self.answer.cancel(None if self._offered or self.usage.completion_tokens else error)

    def enter(self) -> None:
        self.readers += 1
        self._schedule_stop()

    def leave(self) -> None:
        self.readers -= 1
        self._schedule_stop()

    def state(self) -> AnswerState:
        """Return the current state of the answer."""
        pieces = self.log.pieces()
        content = "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta))
        items = [] if all(isinstance(piece, ContentDelta) for piece in pieces) else _items(self.id, pieces, self.status)
        return AnswerState(content, items, self.status, self.finish, self.usage)

    async def _run(self) -> None:
        saving = asyncio.create_task(self._save_now_and_then()) if self._save is not None else None
        finish = "cancelled"
        try:
            if self._background and not self._is_taken_over:
                await self.answer.start()
            while (delta := await self.answer.next()) is not None:
                pieces = delta.choice.sort(delta.text)
                for piece in pieces:
                    self.log.append(piece)
                if pieces:
                    if self._checkpoint is not None:
                        self._marks.append((self._checkpoint.size, len(self.log)))
                    self._show()
            finish = self.answer.choices[0].finish_reason
        except CancelledStreamError:
            if self.failure is not None:
                finish = "error"
        except ApiError as error:
            log_detail(error)
            finish, self.failure = "error", error
        except Exception:
            log.exception("The answer %s failed because of an unexpected error; its client receives an error.", self.id)
            finish, self.failure = (
                "error",
                InternalError(
                    "The gateway failed in the middle of the answer; if a retry fails too, tell its operator."
                ),
            )
        finally:
            if saving is not None:
                saving.cancel()
                await asyncio.gather(saving, *([self._writing] if self._writing else []), return_exceptions=True)
            self.answer.close()
            await self._end(finish)
            if self._unread is not None:
                self._unread.cancel()
            self.wake()

    async def _end(self, finish: str) -> None:
        """Store the end of the answer, and then show the end to the readers.

        The end is shown last because it says whether the answer is stored. An answer that this
        gateway offers to other gateways gets no end; only its text so far is stored. Nothing is
        stored if another gateway has taken the answer over.
        """
        recorder = self._context.usage_recorder
        if not self._offered and await self._is_owner():
            self.finish, self.ended_at = finish, int(time.time())
            if self.failure is not None:
                self.error = self.failure.body()["error"]
            self.saved = await self._stored()
            deadline = time.monotonic() + MAX_STORE_OUTAGE
            while self._background and self._is_store_away and not self._closing and time.monotonic() < deadline:
                await asyncio.sleep(SAVE_INTERVAL)
                self.saved = await self._stored()
            if self._background and self._is_store_away:
                log.warning(
                    "The answer %s was not stored, because the store stayed unavailable. Readers get it for a minute.",
                    self.id,
                )
            if self._checkpoint is None or await self._checkpoint.finish(self._encoded_end()):
                self.over, self.visible = True, len(self.log)
                if recorder is not None:
                    recorder.settle(UsageOwner.HERE)
                return
        elif self._offered:
            await self._stored()
        self.moved = True
        if self._checkpoint is not None and self._checkpoint.replaced:
            if recorder is not None:
                recorder.settle(UsageOwner.HERE)
            return
        self._context.usage = None  # The gateway that takes the answer over bills all of it.
        if self._context.reservation is not None:
            self._context.reservation.hand_over(is_taken=not self._offered)
        if recorder is not None:
            recorder.settle(UsageOwner.OFFERED if self._offered else UsageOwner.ELSEWHERE)

    def _encoded_end(self) -> bytes:
        return EndedAnswer(
            finish=self.finish or "", usage=self.usage, saved=self.saved, ended_at=self.ended_at, error=self.error
        ).encode()

    async def _is_owner(self) -> bool:
        """Return False if another gateway has taken the answer over."""
        return self._checkpoint is None or await self._checkpoint.is_owned()

    async def _save_now_and_then(self) -> None:
        # Write an answer that was taken over at once, because its old row would soon count as lost.
        wait = 0.0 if self._is_taken_over else SAVE_INTERVAL
        while True:
            await asyncio.sleep(wait)
            wait = SAVE_INTERVAL
            if not await self._is_owner():
                return
            # Shielded, because a cancelled write would leave its transaction open.
            self._writing = asyncio.create_task(self._stored())
            await asyncio.shield(self._writing)

    async def _stored(self) -> bool:
        was_away, self._is_store_away = self._is_store_away, False
        if self._save is None:
            return False
        try:
            return await self._save(self)
        except ApiError as error:
            self._is_store_away = isinstance(error, UnavailableError)
            if not (was_away and self._is_store_away):
                tried = "is not stored yet" if self._background and self._is_store_away else "was not stored"
                log.warning("The answer %s %s: %s", self.id, tried, error.full_message)
            return False

    def _show(self) -> None:
        """Make visible the deltas whose tokens the checkpoint confirms, and wake the readers.

        Without a checkpoint that holds deltas back, all deltas become visible.
        """
        checkpoint = self._checkpoint
        if checkpoint is None or not checkpoint.holds:
            self.visible = len(self.log)
            self._marks.clear()
        else:
            while self._marks and self._marks[0][0] <= checkpoint.known:
                self.visible = max(self.visible, self._marks.popleft()[1])
        self.wake()

    def _on_checkpoint(self) -> None:
        checkpoint = self._checkpoint
        assert checkpoint is not None
        if checkpoint.lost or checkpoint.stop:
            self.answer.cancel()
        if checkpoint.is_read_elsewhere != self._is_read_elsewhere:
            self._is_read_elsewhere = checkpoint.is_read_elsewhere
            self._schedule_stop()
        self._show()

    def _schedule_stop(self) -> None:
        """Stop the answer after `UNREAD_TIMEOUT` seconds if it has no reader then."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if not (self.readers or self._is_read_elsewhere or self._background or self.over or self.moved):
            self._unread = asyncio.get_running_loop().call_later(UNREAD_TIMEOUT, self.answer.cancel)


class ChatRunRegistry:
    """The answers of this process: running answers, and answers that ended a short time ago.

    The key of an answer is its owner and its id, because a client may have chosen the id: the id of
    a continued answer is derived from the id of its message.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], ChatRun] = OrderedDict()

    def add(self, run: ChatRun) -> None:
        self._runs[run.owner, run.id] = run
        run.task.add_done_callback(lambda _: self._ended(run))

    def find(self, run_id: str, owner: str) -> ChatRun | None:
        return self._runs.get((owner, run_id))

    async def close(self) -> None:
        """Offer all answers to other gateways, or stop them, and wait until they are stored."""
        running = [run for run in self._runs.values() if not run.task.done()]
        for run in running:
            run.offer()
        await asyncio.gather(*(run.task for run in running), return_exceptions=True)

    def _ended(self, run: ChatRun) -> None:
        if run.moved:
            self._forget(run)
            return
        asyncio.get_running_loop().call_later(RETENTION_SECONDS, self._forget, run)
        while len(self._runs) > MAX_RETAINED_RUNS:
            over = [one for one in self._runs.values() if one.over]
            if not over:
                break
            groups, owners = Counter(one.group for one in over), Counter(one.owner for one in over)
            # Drop the oldest answer of the owner with the most answers in the group with the most,
            # so that neither displaces the answers of others.
            self._forget(max(over, key=lambda one: (groups[one.group], owners[one.owner])))

    def _forget(self, run: ChatRun) -> None:
        if self._runs.get((run.owner, run.id)) is run:
            del self._runs[run.owner, run.id]


def _items(run_id: str, pieces: list[OutputDelta], status: str) -> list[dict[str, Any]]:
    """Return the deltas as items of the Responses API."""
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
