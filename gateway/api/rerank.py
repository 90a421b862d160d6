"""POST /v1/rerank, /v2/rerank and /rerank"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import json_response, record_prompt_usage
from llmops.gateway.api.ignored_fields import report_ignored_fields
from llmops.gateway.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.prompt_limits import check_prompt_characters
from llmops.gateway.http.request_context import context_of
from llmops.gateway.routing.model_registry import ModelLookup
from llmops.gateway.routing.served_models import EncoderInput, EncoderModel
from llmops.gateway.schemas.rerank_request import RerankRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_IGNORED = frozenset({"max_chunks_per_doc", "priority", "user"})


class RerankEndpoint:
    """The endpoint; `handle` is the route."""

    def __init__(self, service: AppState, models: ModelLookup[EncoderModel]) -> None:
        self._service, self._models = service, models

    async def handle(self, request: Request) -> Response:
        context = context_of(request)
        body = await self._service.intake.load(RerankRequest, request)
        model = self._models.get(body.model, context.caller)
        report_ignored_fields(context, self._service, body, _IGNORED)
        texts = _texts(body, self._service.limits.inputs)
        queries = len(texts) if model.reads_pairs else 1
        check_prompt_characters(queries * len(body.query) + sum(map(len, texts)), self._service.limits, "documents")
        caller = context.caller.share
        rows = await self._service.text_threads.run(lambda: _rows(body, texts, model), context.size, caller)
        tokens = sum(len(row.ids) for row in rows)
        if context.grant is not None:
            await context.grant.tokens(model.name, tokens)
        with record_prompt_usage(context, model.name, tokens):
            scores = await model.scores(rows, caller, context.onward)
        return json_response(_answer(body, texts, scores, tokens))


def _texts(body: RerankRequest, most: int) -> list[str]:
    if len(body.documents) > most:
        raise InvalidRequestError(f"At most {most} documents are allowed.", param="documents")
    if body.rank_fields not in (None, ["text"]):
        raise UnsupportedError(
            'Documents are ranked by their text; leave rank_fields out, or send ["text"].', param="rank_fields"
        )
    return [one if isinstance(one, str) else one.text for one in body.documents]


def _rows(body: RerankRequest, texts: Sequence[str], model: EncoderModel) -> list[EncoderInput]:
    query = _query(body.query, model)
    room = model.room(len(query))
    if room < 1:
        raise _too_long_query(model, f"{len(query)}")
    return model.rows(query, [_document(text, at, body, model, room) for at, text in enumerate(texts)])


def _query(text: str, model: EncoderModel) -> list[int]:
    least = model.tokenizer.min_token_count(text, model.card.max_seq_len)
    if least > model.card.max_seq_len:
        raise _too_long_query(model, f"at least {least}")
    return model.tokenizer.encode(text, add_special_tokens=False)


def _document(text: str, at: int, body: RerankRequest, model: EncoderModel, room: int) -> list[int]:
    wanted = min(room, body.max_tokens_per_doc or room)
    ids = model.tokenizer.encode_beginning(text, wanted, add_special_tokens=False)
    if body.truncation is False and min(len(ids), body.max_tokens_per_doc or len(ids)) > room:
        raise ContextLengthError(
            f"Document {at} has more than the {room} tokens that the query leaves it of this model's maximum context "
            f"length of {model.card.max_seq_len}; shorten it, or leave truncation out to have it cut.",
            param=f"documents[{at}]",
        )
    return ids[:wanted]


def _too_long_query(model: EncoderModel, tokens: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {model.card.max_seq_len} tokens, special ones included, but the query "
        f"alone has {tokens}; shorten it.",
        param="query",
    )


def _answer(body: RerankRequest, texts: Sequence[str], scores: NDArray[np.float32], tokens: int) -> dict[str, Any]:
    """Results best first; of two that score the same, the one that was sent first."""
    order = sorted(range(len(texts)), key=lambda at: -scores[at])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": at, "relevance_score": float(scores[at])} for at in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "model": body.model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        # Cohere's own place for it
        "meta": {"billed_units": {"input_tokens": tokens}, "tokens": {"input_tokens": tokens, "output_tokens": 0}},
    }
