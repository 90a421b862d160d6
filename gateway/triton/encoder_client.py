"""Text encoders on Triton: their card, token ids to a request, and its answer to vectors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from tritonclient.grpc import service_pb2

from llmops.contract import EMBEDDING_IDS, EMBEDDING_LENGTHS, METADATA_PARAMETER, SCORE_TYPES
from llmops.errors import InputError, first_validation_error
from llmops.gateway.errors import EngineError, UnavailableError
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.telemetry.trace_context import TRACEPARENT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TokenRows = Sequence[Sequence[int]]
CallMetadata = Sequence[tuple[str, str]]
InferCall = Callable[..., Awaitable[service_pb2.ModelInferResponse]]


@dataclass(frozen=True, slots=True)
class EncoderMetadata:
    """What an encoder announces of itself. Lengths in tokens; `dimensions` are the numbers that each row gives."""

    name: str
    target: str
    tokenizer_dir: str
    max_batch_size: int
    max_seq_len: int
    vocab_size: int
    dimensions: int
    built: int = 0


_ADAPTER = TypeAdapter(EncoderMetadata)


def parse_encoder_metadata(text: str, overrides: Mapping[str, Any]) -> EncoderMetadata:
    """`overrides` (from the gateway's configuration) win. Raises InputError when it cannot be understood."""
    try:
        return _ADAPTER.validate_python({**json.loads(text or "{}"), **overrides})
    except ValidationError as error:
        raise InputError(
            f"the model's {METADATA_PARAMETER} cannot be used ({first_validation_error(error)})"
        ) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"the model's {METADATA_PARAMETER} is not a JSON object: {error}") from error


class TritonEncoder:
    """One encoder model on one server. Requests of any number of rows are cut to its batch size.

    Triton is first come, first served, so it gets only the batch that it runs and the next one; callers take turns for
    places in these.
    """

    def __init__(self, infer: InferCall, model: str, card: EncoderMetadata, queued: int = 16_384) -> None:
        """`infer` takes a request, and metadata if there is any. `model` is Triton's name for it; `queued`: how many
        rows may wait here, of which no client gets all."""
        self._infer, self._model, self._card = infer, model, card
        self._at_once = 2 * card.max_batch_size
        self._places, self._queued = FairSlots(self._at_once), FairShares(queued)

    def resize(self, servers: int) -> None:
        """`infer` sends the batches to so many servers, which work on them side by side."""
        self._at_once = 2 * self._card.max_batch_size * max(servers, 1)
        self._places.resize(self._at_once)

    async def send(
        self, request: service_pb2.ModelInferRequest, *metadata: CallMetadata
    ) -> service_pb2.ModelInferResponse:
        """A batch that somebody else cut and counts."""
        request.model_name = self._model
        return await self._infer(request, *metadata)

    async def run(
        self, rows: TokenRows, types: TokenRows | None = None, caller: str = "", trace: str = ""
    ) -> NDArray[np.float32]:
        """FP32 [len(rows), dimensions] in order; `types` for a cross-encoder, as long as the rows.

        For `caller`, `a/b` for `b` of `a`; `trace` as of EngineRequest. Raises ApiError for what Triton refuses or
        breaks on, and UnavailableError when the queue is full, or the caller's share of it; a request alone is never
        too long.
        """
        queued, size, path = self._queued, self._card.max_batch_size, caller.split("/", 1)
        queued.free = self._at_once if queued.taken else len(rows)
        if not queued.take(caller, len(rows)):
            raise UnavailableError(
                f"Too many inputs wait for the model '{self._card.name}'; try again.", code="overloaded", retry_after=1
            )
        batches = [
            asyncio.ensure_future(
                self._in_turn(path, rows[at : at + size], None if types is None else types[at : at + size], trace)
            )
            for at in range(0, len(rows), size)
        ]
        try:
            return _join_responses(await asyncio.gather(*batches), self._card.dimensions)
        finally:
            for batch in batches:
                batch.cancel()
            queued.give_back(caller, len(rows))

    async def _in_turn(
        self, path: Sequence[str], rows: TokenRows, types: TokenRows | None, trace: str
    ) -> service_pb2.ModelInferResponse:
        await self._places.enter(path, len(rows))
        try:
            request = _build_request(self._model, rows, types)
            return await (self._infer(request, ((TRACEPARENT, trace),)) if trace else self._infer(request))
        finally:
            self._places.leave(len(rows))


def _build_request(model: str, rows: TokenRows, types: TokenRows | None) -> service_pb2.ModelInferRequest:
    import numpy as np

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
    import numpy as np

    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return padded


def _join_responses(answers: Sequence[Any], dimensions: int) -> NDArray[np.float32]:
    import numpy as np

    raw = b"".join(content for answer in answers for content in answer.raw_output_contents)
    if len(raw) % (4 * dimensions):
        raise EngineError("the encoder's answer does not have the size it announced.")
    return np.frombuffer(raw, dtype=np.float32).reshape(-1, dimensions)
