"""POST /v1/embeddings"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import json_bytes, record_prompt_usage
from llmops.gateway.api.ignored_fields import report_ignored_fields
from llmops.gateway.errors import ContextLengthError, InvalidRequestError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.prompt_limits import check_prompt_characters
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Usage
from llmops.gateway.routing.model_registry import ModelLookup
from llmops.gateway.routing.served_models import EmbeddingModel
from llmops.gateway.schemas.embedding_request import EmbeddingRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# numbers that are written in one go, a few milliseconds
FLOATS_PER_TURN = 4096


class EmbeddingsEndpoint:
    """The endpoint; `handle` is the route."""

    def __init__(self, service: AppState, models: ModelLookup[EmbeddingModel]) -> None:
        self._service, self._models = service, models

    async def handle(self, request: Request) -> Response:
        context = context_of(request)
        body = await self._service.intake.load(EmbeddingRequest, request)
        model = self._models.get(body.model, context.caller)
        report_ignored_fields(context, self._service, body)
        _check_dimensions(body, model)
        inputs = _inputs(body, self._service.limits.inputs)
        check_prompt_characters(sum(len(one) for one in inputs if isinstance(one, str)), self._service.limits, "input")
        caller = context.caller.share
        rows = await self._service.text_threads.run(lambda: _rows(inputs, body, model), context.size, caller)
        tokens = sum(map(len, rows))
        if context.grant is not None:
            await context.grant.tokens(model.name, tokens)
        with record_prompt_usage(context, model.name, tokens) as used:
            vectors = _shortened(await model.embed(rows, caller, context.onward), body.dimensions)
        return Response(await _answer(body, vectors, used), media_type="application/json")


def _check_dimensions(body: EmbeddingRequest, model: EmbeddingModel) -> None:
    if body.dimensions is not None and body.dimensions > model.card.dimensions:
        raise InvalidRequestError(f"dimensions is at most {model.card.dimensions} here.", param="dimensions")


def _inputs(body: EmbeddingRequest, most: int) -> list[str | list[int]]:
    given: Any = body.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("input must not be empty.", param="input")
    inputs = [given] if isinstance(given[0], int) else list(given)
    if len(inputs) > most:
        raise InvalidRequestError(f"At most {most} inputs are allowed.", param="input")
    return inputs


def _rows(inputs: list[str | list[int]], body: EmbeddingRequest, model: EmbeddingModel) -> list[list[int]]:
    wanted = _wanted(body, model)
    return [_fitting(_ids(one, model, at, wanted), model, at, wanted) for at, one in enumerate(inputs)]


def _wanted(body: EmbeddingRequest, model: EmbeddingModel) -> int | None:
    """The tokens to which inputs are cut; None where they are not."""
    limit, asked = model.card.max_seq_len, body.truncate_prompt_tokens
    return None if not asked else limit if asked < 0 else min(asked, limit)


def _ids(one: str | list[int], model: EmbeddingModel, at: int, wanted: int | None) -> list[int]:
    if isinstance(one, str):
        if wanted is not None:
            return model.tokenizer.encode_beginning(one, wanted)
        _refuse(model.tokenizer.min_token_count(one, model.card.max_seq_len), model, at, "at least ")
        return model.tokenizer.encode(one)
    if not one:
        raise InvalidRequestError("A list of token ids must not be empty.", param=f"input[{at}]")
    if max(one) >= model.card.vocab_size:
        raise InvalidRequestError(f"Token {max(one)} is not in this model's vocabulary.", param=f"input[{at}]")
    return one


def _fitting(ids: list[int], model: EmbeddingModel, at: int, wanted: int | None) -> list[int]:
    if wanted is not None:
        # the last token closes the text for the model; what is cut is before it
        return ids if len(ids) <= wanted else [*ids[: wanted - 1], ids[-1]]
    _refuse(len(ids), model, at)
    return ids


def _refuse(tokens: int, model: EmbeddingModel, at: int, about: str = "") -> None:
    if tokens > model.card.max_seq_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.card.max_seq_len} tokens, but input {at} has "
            f"{about}{tokens}; shorten it, or set truncate_prompt_tokens.",
            param="input",
        )


def _shortened(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    import numpy as np

    cut = vectors[:, :dimensions]
    lengths = np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return np.asarray(cut / lengths, dtype=np.float32)


async def _answer(body: EmbeddingRequest, vectors: NDArray[np.float32], used: Usage) -> bytes:
    """In pieces, between which others have their turn: a million numbers take a second to write."""
    parts = []
    for begin in range(0, len(vectors), rows := max(FLOATS_PER_TURN // vectors.shape[1], 1)):
        parts += [_entry(body, at, vectors[at]) for at in range(begin, min(begin + rows, len(vectors)))]
        await asyncio.sleep(0)
    usage = {"prompt_tokens": used.prompt_tokens, "total_tokens": used.prompt_tokens}
    head, tail = b'{"object":"list","data":[', b'],"model":%b,"usage":%b}' % (json_bytes(body.model), json_bytes(usage))
    return head + b",".join(parts) + tail


def _entry(body: EmbeddingRequest, index: int, vector: NDArray[np.float32]) -> bytes:
    as_text = body.encoding_format == "base64"
    written = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()
    return json_bytes({"object": "embedding", "index": index, "embedding": written})
