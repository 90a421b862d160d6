"""The token stream of one slot of a step stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from llmops.contract import CANCELLED_FLAG, ERROR_FLAG, LAST_OF_SLOT
from llmops.gateway.errors import CancelledStreamError, UnavailableError
from llmops.gateway.interfaces import TokenBatch, TokenSink, TokenStream
from llmops.gateway.triton.response_reader import error_from_message
from llmops.gateway.triton.step_writer import Submission

#: Maximum number of tokens that are merged into one batch for a slow reader, which renders a batch
#: at once.
MAX_MERGED_TOKENS = 64


class SlotStream(TokenStream):
    """The token stream of one slot.

    Unread batches wait in this object, so that a slow client does not delay other clients.
    """

    def __init__(self, slot: int, submission: Submission, sequences: int, leave: Callable[[int], None]) -> None:
        """Create a stream.

        Args:
            slot: Number of the slot.
            submission: The request, as submitted to the engine.
            sequences: Number of sequences that the request asks for.
            leave: Removes the slot from the engine's batch.
        """
        self._leave = leave
        self.number, self.sequences = slot, sequences
        # number of health checks that found the engine idle before its first entry for the slot
        self.unanswered_checks = 0
        # kept until the engine's first entry for the slot, to be sent again over a new connection
        self.unconfirmed: Submission | None = submission
        self._batches: deque[TokenBatch] = deque()
        # the last unread batch of each sequence
        self._last: dict[int, TokenBatch] = {}
        self._waiter: asyncio.Future | None = None
        self._sink: TokenSink | None = None
        self._taken: list[TokenBatch] | None = None
        self._error: Exception | None = None
        self._ended = self._cancelled = False

    async def __anext__(self) -> TokenBatch:
        while not self._batches:
            if self._cancelled:
                raise CancelledStreamError()
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch = self._batches.popleft()
        if self._last.get(batch.sequence) is batch:
            del self._last[batch.sequence]
        return batch

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        self._sink, self._taken = sink, taken

    def push(self, batch: TokenBatch) -> None:
        self.unconfirmed = None
        if self._sink is not None and self._waiter is not None and not self._waiter.done():
            try:
                if self._sink(batch):
                    if self._taken is not None:
                        self._taken.append(batch)
                    return
            except Exception as error:  # noqa: BLE001  the reader handles it; the other streams of this step continue
                self.fail(error)
                return
        self._keep(batch)
        self._wake()

    def _keep(self, batch: TokenBatch) -> None:
        """Store a batch for the reader, merged into its sequence's last unread batch if there is room.

        Merging keeps the memory for a slow reader at a few dozen bytes per token. The batches share
        their lists with no one else.
        """
        last = self._last.get(batch.sequence)
        if (
            last is None
            or len(last.tokens) >= MAX_MERGED_TOKENS
            or (last.logprobs is None, last.tops is None) != (batch.logprobs is None, batch.tops is None)
        ):
            self._batches.append(batch)
            self._last[batch.sequence] = batch
            return
        for kept, new in ((last.tokens, batch.tokens), (last.logprobs, batch.logprobs), (last.tops, batch.tops)):
            if new is not None:
                assert isinstance(kept, list)
                kept.extend(new)

    def mark(self, flags: int, error: str | None) -> None:
        self.unconfirmed = None
        if flags & ERROR_FLAG:
            self.fail(error_from_message(error or ""))
        elif flags & CANCELLED_FLAG:
            self.fail(UnavailableError("The engine cancelled the request; send the request again."))
        elif flags & LAST_OF_SLOT:
            self._ended = True
            self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._batches.clear()
            self._last.clear()
            self._leave(self.number)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
