"""The endpoint POST /v1/embeddings."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmops.gateway.api.generation_response import json_bytes, record_prompt_usage
from llmops.gateway.api.ignored_fields import report_ignored_fields
from llmops.gateway.errors import ContextLengthError, InvalidRequestError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.prompt_limits import check_prompt_characters
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Usage
from llmops.gateway.routing.model_registry import ModelLookup
from llmops.gateway.routing.served_models import EmbeddingModel
from llmops.gateway.schemas.request_fields import RequestModel, TokenId
from llmops.gateway.schemas.response_schemas import EmbeddingList

#: Number of floats that are encoded before other requests run again. Encoding this many takes a few
#: milliseconds of the event loop.
FLOATS_PER_TURN = 4096
#: Bytes of memory per number while vectors are read: four bytes in Triton's response and four in an
#: array.
BYTES_PER_FLOAT = 8


class EmbeddingRequest(RequestModel):
    """A request for embeddings. `input` is one or several texts or lists of token ids."""

    model: str
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="float when absent.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Return only the first numbers of each vector, scaled to length 1."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        default=None,
        description="Cut longer texts to this many tokens (-1: the model's limit) instead of rejecting them.",
    )
    user: str | None = None
    metadata: dict[str, Any] | None = None


class EmbeddingsEndpoint:
    """The endpoint of embeddings."""

    def __init__(self, service: AppState, models: ModelLookup[EmbeddingModel]) -> None:
        self._service, self._models = service, models

    def add_routes(self, app: GatewayApp) -> None:
        """Add the route to `app`."""
        app.add_endpoint(
            "POST", "/v1/embeddings", self.create, "Create embeddings", EmbeddingList, body=EmbeddingRequest
        )

    async def create(self, request: Request) -> Response:
        """Return an embedding vector for each input."""
        context = context_of(request)
        body = await self._service.intake.load(EmbeddingRequest, request)
        model = self._models.get(body.model, context.caller)
        report_ignored_fields(context, self._service, body)
        if body.dimensions is not None and body.dimensions > model.card.dimensions:
            raise InvalidRequestError(
                f"dimensions must be at most {model.card.dimensions} for this model.", param="dimensions"
            )
        inputs = _inputs(body, self._service.limits.inputs)
        check_prompt_characters(sum(len(one) for one in inputs if isinstance(one, str)), self._service.limits, "input")
        caller = context.caller.share
        rows = await self._service.text_threads.run(lambda: _rows(inputs, body, model), context.work_bytes, caller)
        tokens = sum(map(len, rows))
        self._service.intake.hold(BYTES_PER_FLOAT * len(rows) * model.card.dimensions, context)
        if context.reservation is not None:
            await context.reservation.tokens(model.name, tokens)
        with record_prompt_usage(context, model.name, tokens) as usage:
            vectors = _shorten(await model.embed(rows, caller, context.traceparent), body.dimensions)
        answer = _encode(body, vectors, usage)
        if vectors.size > FLOATS_PER_TURN:
            # The response is encoded while the client reads it, so that memory holds only a part of
            # the text.
            return StreamingResponse(answer, media_type="application/json")
        return Response(b"".join([part async for part in answer]), media_type="application/json")


def _inputs(body: EmbeddingRequest, limit: int) -> list[str | list[int]]:
    """Return the inputs as a list.

    Raises:
        InvalidRequestError: There are no inputs, or more than `limit`.
    """
    given: Any = body.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("input must not be empty.", param="input")
    inputs = [given] if isinstance(given[0], int) else list(given)
    if len(inputs) > limit:
        raise InvalidRequestError(
            f"At most {limit} inputs are allowed; send the others in another request.", param="input"
        )
    return inputs


def _rows(inputs: list[str | list[int]], body: EmbeddingRequest, model: EmbeddingModel) -> list[list[int]]:
    """Return the token ids of each input, cut to `truncate_prompt_tokens` if the request sets it.

    Raises:
        InvalidRequestError: An input is empty, or has ids that are not in the vocabulary.
        ContextLengthError: An input is longer than the model's context, and the request does not
            set `truncate_prompt_tokens`.
    """
    longest, truncate = model.card.max_seq_len, body.truncate_prompt_tokens
    cut = None if not truncate else longest if truncate < 0 else min(truncate, longest)
    rows = []
    for index, one in enumerate(inputs):
        ids = _ids(one, model, index, cut)
        if cut is None:
            _check_length(len(ids), model, index)
        elif len(ids) > cut:
            # The last token marks the end of a text for the model, so a cut text keeps it.
            ids = [*ids[: cut - 1], ids[-1]]
        rows.append(ids)
    return rows


def _ids(one: str | list[int], model: EmbeddingModel, index: int, cut: int | None) -> list[int]:
    if isinstance(one, str):
        if cut is not None:
            return model.tokenizer.encode_beginning(one, cut)
        _check_length(model.tokenizer.min_token_count(one, model.card.max_seq_len), model, index, "at least ")
        return model.tokenizer.encode(one)
    if not one:
        raise InvalidRequestError("A list of token ids must not be empty.", param=f"input[{index}]")
    if max(one) >= model.card.vocab_size:
        raise InvalidRequestError(
            f"Token {max(one)} is not in this model's vocabulary: ids are below {model.card.vocab_size}.",
            param=f"input[{index}]",
        )
    return one


def _check_length(tokens: int, model: EmbeddingModel, index: int, about: str = "") -> None:
    if tokens > model.card.max_seq_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.card.max_seq_len} tokens, but input {index} has "
            f"{about}{tokens}; shorten it, or set truncate_prompt_tokens.",
            param="input",
        )


def _shorten(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions` numbers of each vector, scaled to length 1.

    Args:
        vectors: The vectors, one per row.
        dimensions: The number of columns to keep; None keeps all.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    cut = vectors[:, :dimensions]
    lengths = np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return np.asarray(cut / lengths, dtype=np.float32)


async def _encode(body: EmbeddingRequest, vectors: NDArray[np.float32], used: Usage) -> AsyncIterator[bytes]:
    """Yield the response as JSON in pieces, and let other requests run between two pieces.

    A million numbers take a second to encode, and their text has 20 MB.
    """
    yield b'{"object":"list","data":['
    rows = max(FLOATS_PER_TURN // vectors.shape[1], 1)
    for start in range(0, len(vectors), rows):
        entries = [_entry(body, at, vectors[at]) for at in range(start, min(start + rows, len(vectors)))]
        yield b"," * bool(start) + b",".join(entries)
        await asyncio.sleep(0)
    usage = {"prompt_tokens": used.prompt_tokens, "total_tokens": used.prompt_tokens}
    yield b'],"model":%b,"usage":%b}' % (json_bytes(body.model), json_bytes(usage))


def _entry(body: EmbeddingRequest, index: int, vector: NDArray[np.float32]) -> bytes:
    as_text = body.encoding_format == "base64"
    numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()
    return json_bytes({"object": "embedding", "index": index, "embedding": numbers})
