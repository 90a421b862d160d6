"""An answer that another gateway generates, for readers at this gateway.

The tokens come from Redis (`checkpoints.py`) and are rendered into the same events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmops.gateway.conversations.answer_run import AnswerFormat, AnswerRun, replay_batches
from llmops.gateway.conversations.chat_run import EndedAnswer
from llmops.gateway.conversations.checkpoints import CheckpointStore, FollowedTokens, decode_batches
from llmops.gateway.errors import ApiError, InternalError, UnavailableError
from llmops.gateway.generation.choice import Choice
from llmops.gateway.interfaces import FINISH_REASONS, Usage, shared_answer_id
from llmops.gateway.logging_setup import request_logger
from llmops.input_files import MALFORMED

log = request_logger(__name__)

#: Seconds without a reply of Redis after which readers are disconnected, so that they reconnect to
#: any gateway.
SILENCE_TIMEOUT = 10.0


class FollowedRun(AnswerRun):
    """An answer that another gateway generates. The answer is followed as long as readers exist."""

    def __init__(
        self,
        run_id: str,
        owner: str,
        form: AnswerFormat,
        choice: Choice,
        store: CheckpointStore,
        share: str,
        on_idle: Callable[[], None],
    ) -> None:
        """Prepare to follow an answer.

        Args:
            run_id: The id of the answer.
            owner: The owner of the answer.
            form: The form of the answer's events.
            choice: A new choice, which turns the tokens into text.
            store: The store of checkpoints.
            share: The `Caller.share` of the answer's caller.
            on_idle: Called when the last reader has left.
        """
        super().__init__(run_id, owner, form)
        self._choice, self._store, self._share, self._on_idle = choice, store, share, on_idle
        self._usage = Usage(0)
        self._tokens = FollowedTokens(shared_answer_id(owner, run_id), self._deliver)
        self._news: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._heard = asyncio.get_running_loop().time()
        #: Set once all tokens that Redis had at first are in the log.
        self.caught_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def usage(self) -> Usage:
        return self._usage

    def enter(self) -> None:
        self.readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"follow-{self.id}")
            self._store.follow(self._tokens)

    def leave(self) -> None:
        self.readers -= 1
        if not self.readers:
            self._close()
            if self._task is not None:
                self._task.cancel()
            self._on_idle()

    async def stop(self) -> None:
        self.enter()
        try:
            await self._store.request_stop(self._tokens.id)
            while not (self.over or self.moved):
                await self.more()
        finally:
            self.leave()
        if self.moved:
            raise UnavailableError("The gateway could not confirm that the answer has stopped; try again.")

    def _deliver(self, news: tuple[bytes, bytes] | None) -> None:
        now = asyncio.get_running_loop().time()
        if news is not None:
            self._heard = now
            if news[0] or news[1] or not self.caught_up.is_set():
                self._news.put_nowait(news)
        elif now - self._heard > SILENCE_TIMEOUT:
            self.moved = True
            self.caught_up.set()
            self._close()
            self.wake()

    def _close(self) -> None:
        self._store.unfollow(self._tokens)

    async def _run(self) -> None:
        while not self.over:
            tokens, end = await self._news.get()
            try:
                await replay_batches(self._choice, list(decode_batches(tokens)), self.log, self._share)
                if end:
                    self._close()
                    self._finish(EndedAnswer.model_validate_json(end))
            except (ApiError, *MALFORMED) as error:
                log.error("The answer %s is damaged in Redis (%s).", self.id, type(error).__name__)
                self._close()
                damage = InternalError("The rest of this answer is damaged; send the request again.")
                self.finish, self.error, self.over = "error", damage.body()["error"], True
            self.visible = len(self.log)
            self.caught_up.set()
            self.wake()

    def _finish(self, ended: EndedAnswer) -> None:
        if ended.finish in FINISH_REASONS and not self._choice.done:
            for piece in self._choice.sort(self._choice.finish()):
                self.log.append(piece)
        self.finish, self.saved, self._usage = ended.finish, ended.saved, ended.usage
        self.ended_at, self.error = ended.ended_at, ended.error
        self.over = True
