"""The merge of several token streams into one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from llmops.gateway.errors import ApiError, CancelledStreamError
from llmops.gateway.interfaces import Failover, TokenBatch, TokenStream


class MergedStream(TokenStream):
    """A token stream with the tokens of several streams, in the order of their arrival."""

    def __init__(self, streams: Sequence[TokenStream], first: Sequence[int]) -> None:
        """Merge `streams`.

        Args:
            streams: The streams to merge.
            first: For each stream, the number of its first sequence here. Its other sequences
                follow.
        """
        self._streams = streams
        self._queue: asyncio.Queue[TokenBatch | ApiError | None] = asyncio.Queue(maxsize=64)
        self._open = len(streams)
        self._cancelled = False
        self._pumps = [asyncio.create_task(self._pump(*one)) for one in zip(streams, first, strict=True)]

    @property
    def cached_tokens(self) -> int | None:  # type: ignore[override]
        """Return the sum over all prompts, or None if an engine does not report cached tokens."""
        found = [stream.cached_tokens for stream in self._streams]
        return None if None in found else sum(one or 0 for one in found)

    @property
    def version(self) -> str:  # type: ignore[override]
        """Return the version that answers the first stream."""
        return self._streams[0].version

    @property
    def is_failing_over(self) -> bool:  # type: ignore[override]
        return any(stream.is_failing_over for stream in self._streams)

    @property
    def moves(self) -> Sequence[Failover]:  # type: ignore[override]
        return [move for stream in self._streams for move in stream.moves]

    @property
    def splices(self) -> Mapping[str, int]:  # type: ignore[override]
        found = Counter[str]()
        for stream in self._streams:
            found.update(stream.splices)
        return found

    async def __anext__(self) -> TokenBatch:
        while self._open and not self._cancelled:
            item = await self._queue.get()
            if isinstance(item, TokenBatch):
                return item
            if item is not None:
                self.cancel()
                raise item
            self._open -= 1
        if self._cancelled:
            raise CancelledStreamError
        raise StopAsyncIteration

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        for stream, pump in zip(self._streams, self._pumps, strict=True):
            stream.cancel()
            pump.cancel()
        # wakes a waiting reader even if the queue is full
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def _pump(self, stream: TokenStream, first: int) -> None:
        try:
            async for batch in stream:
                await self._queue.put(batch._replace(sequence=batch.sequence + first))
            await self._queue.put(None)
        except ApiError as error:
            await self._queue.put(error)
