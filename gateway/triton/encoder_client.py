"""The client of text encoders on Triton, which turns token ids into vectors."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from llmops.contract import EMBEDDING_IDS, EMBEDDING_LENGTHS, SCORE_TYPES
from llmops.gateway.errors import EngineError, OverloadedError
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.telemetry.trace_context import TRACEPARENT
from llmops.gateway.triton.model_metadata import EncoderMetadata

TokenRows = Sequence[Sequence[int]]
CallMetadata = Sequence[tuple[str, str]]
InferCall = Callable[..., Awaitable[service_pb2.ModelInferResponse]]

#: Maximum number of full batches in flight per server: the batch that runs, and the next batch, so
#: that the encoder never waits for this gateway.
BATCHES_PER_SERVER = 2
#: Maximum number of tokens in a batch, with padding; a longer row is a batch of its own. Bounds the
#: time that other requests wait for a batch: 64 texts of 240 tokens take seconds on a CPU.
BATCH_TOKENS = 2048
#: Seconds in Retry-After when the queue is full. Encoder batches are short, so a slot is free soon.
RETRY_AFTER = 1


class TritonEncoder:
    """A client of one encoder model. Requests with any number of rows are cut into batches.

    Triton serves in order of arrival. To keep callers equal, a server gets only the batch that runs
    and the next batch. Callers take turns for the slots in these batches, and within the turns of a
    caller its requests take turns.
    """

    def __init__(self, infer: InferCall, model: str, card: EncoderMetadata, queued: int = 16_384) -> None:
        """Create a client.

        Args:
            infer: Sends a request, with call metadata if any is given, and returns the response.
            model: Name of the model in Triton.
            card: Metadata of the model.
            queued: Maximum number of rows that wait in this process. No client can fill the whole
                queue.
        """
        self._infer, self._model, self._card = infer, model, card
        self._capacity = BATCHES_PER_SERVER * card.max_batch_size
        self._slots, self._queue = FairSlots(self._capacity), FairShares(queued)
        self._requests = count()

    def resize(self, servers: int) -> None:
        """Set the number of servers among which `infer` distributes the batches."""
        self._capacity = BATCHES_PER_SERVER * self._card.max_batch_size * max(servers, 1)
        self._slots.resize(self._capacity)

    async def send(
        self, request: service_pb2.ModelInferRequest, *metadata: CallMetadata
    ) -> service_pb2.ModelInferResponse:
        """Send a batch that the caller has already cut and counted against the slots."""
        request.model_name = self._model
        return await self._infer(request, *metadata)

    async def run(
        self, rows: TokenRows, types: TokenRows | None = None, caller: str = "", trace: str = ""
    ) -> NDArray[np.float32]:
        """Encode rows of token ids.

        Args:
            rows: Token ids of each row.
            types: Token type ids of each row, shaped like `rows`. Required by cross-encoders only.
            caller: Key of the caller's fair share, `Caller.share`.
            trace: Value of the `traceparent` header for Triton, or an empty string.

        Returns:
            FP32 [len(rows), dimensions], in the order of the rows.

        Raises:
            OverloadedError: The queue, or the caller's share of the queue, is full. A request
                that finds the queue empty always fits.
            ApiError: Triton rejects the request or fails on it.
        """
        queue, request = self._queue, str(next(self._requests))
        queue.free = self._capacity if queue.taken else len(rows)
        if not queue.take(caller, len(rows)):
            raise OverloadedError(
                f"Too many inputs wait for the model '{self._card.name}'; try again.", retry_after=RETRY_AFTER
            )
        batches = [
            asyncio.ensure_future(
                self._run_batch(
                    self._slots.slot(caller, slots, request),
                    rows[batch],
                    None if types is None else types[batch],
                    trace,
                )
            )
            for batch, slots in _cut_batches(rows, self._card.max_batch_size)
        ]
        try:
            return _join_responses(await asyncio.gather(*batches), len(rows), self._card.dimensions)
        finally:
            for batch in batches:
                batch.cancel()
            queue.give_back(caller, len(rows))

    async def _run_batch(
        self, slot: AbstractAsyncContextManager[None], rows: TokenRows, types: TokenRows | None, trace: str
    ) -> service_pb2.ModelInferResponse:
        async with slot:
            request = _build_request(self._model, rows, types)
            return await (self._infer(request, ((TRACEPARENT, trace),)) if trace else self._infer(request))


def _cut_batches(rows: TokenRows, size: int) -> Iterator[tuple[slice, int]]:
    """Yield the rows of each batch, and its number of slots: `size` for a full batch.

    A batch is full with `size` rows or with `BATCH_TOKENS` tokens.
    """
    start = 0
    while start < len(rows):
        end, longest = start, 1
        while end < min(len(rows), start + size):
            padded = max(longest, len(rows[end]))
            if end > start and (end + 1 - start) * padded > BATCH_TOKENS:
                break
            end, longest = end + 1, padded
        tokens = (end - start) * longest
        yield slice(start, end), min(max(end - start, ceil(size * tokens / BATCH_TOKENS)), size)
        start = end


def _build_request(model: str, rows: TokenRows, types: TokenRows | None) -> service_pb2.ModelInferRequest:
    lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
    tensors = [(EMBEDDING_IDS, _pad_rows(rows)), (EMBEDDING_LENGTHS, lengths)]
    if types is not None:
        tensors.append((SCORE_TYPES, _pad_rows(types)))
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor, array in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def _pad_rows(rows: TokenRows) -> NDArray[np.int32]:
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return padded


def _join_responses(responses: Sequence[Any], rows: int, dimensions: int) -> NDArray[np.float32]:
    raw = b"".join(content for response in responses for content in response.raw_output_contents)
    if len(raw) != 4 * rows * dimensions:
        raise EngineError("The encoder's answer does not have the size in the model's metadata; see Triton's log.")
    vectors = np.frombuffer(raw, dtype=np.float32).reshape(rows, dimensions)
    if not np.isfinite(vectors).all():
        # JSON cannot represent NaN and infinity
        raise EngineError("The encoder's answer has numbers that are not finite; check its weights.")
    return vectors
