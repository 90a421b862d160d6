"""The endpoints POST /v1/rerank, /v2/rerank and /rerank."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import json_response, record_prompt_usage
from llmops.gateway.api.ignored_fields import report_ignored_fields
from llmops.gateway.errors import ContextLengthError, InvalidRequestError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.prompt_limits import check_prompt_characters
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import context_of
from llmops.gateway.routing.model_registry import ModelLookup
from llmops.gateway.routing.served_models import EncoderInput, EncoderModel
from llmops.gateway.schemas.request_fields import RequestModel
from llmops.gateway.schemas.response_schemas import RerankResponse

_IGNORED_FIELDS = frozenset({"max_chunks_per_doc", "priority", "user"})


class RerankDocument(RequestModel):
    """A document that is an object. Only its text is ranked."""

    text: str


class RerankRequest(RequestModel):
    """A request to rank documents by their relevance to a query.

    The fields are Cohere's and Jina's, with vLLM's additions.
    """

    model: str
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Maximum number of results; all when absent."
    )
    return_documents: bool | None = Field(default=None, description="Include the documents' texts in the results.")
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Cut documents to this many tokens, not counting special tokens."
    )
    max_chunks_per_doc: int | None = None
    priority: int | None = None
    user: str | None = None


#: Number of decimals of a score. The score of a text differs in the eighth decimal between batches
#: of different sizes.
SCORE_DECIMALS = 6


class RerankEndpoint:
    """The endpoint that ranks documents, at the paths that the clients of three vendors use."""

    def __init__(self, service: AppState, models: ModelLookup[EncoderModel]) -> None:
        self._service, self._models = service, models

    def add_routes(self, app: GatewayApp) -> None:
        """Add the routes to `app`."""
        for path, clients in (("/v1/rerank", ""), ("/v2/rerank", " (Cohere v2)"), ("/rerank", " (Jina, vLLM)")):
            summary = f"Rerank documents{clients}"
            app.add_endpoint("POST", path, self.create, summary, RerankResponse, body=RerankRequest, tag="rerank")

    async def create(self, request: Request) -> Response:
        """Return the documents with their relevance to the query, the most relevant first."""
        context = context_of(request)
        body = await self._service.intake.load(RerankRequest, request)
        model = self._models.get(body.model, context.caller)
        report_ignored_fields(context, self._service, body, _IGNORED_FIELDS)
        texts = _texts(body, self._service.limits.inputs)
        queries = len(texts) if model.reads_pairs else 1
        check_prompt_characters(queries * len(body.query) + sum(map(len, texts)), self._service.limits, "documents")
        caller = context.caller.share
        rows = await self._service.text_threads.run(lambda: _rows(body, texts, model), context.work_bytes, caller)
        tokens = sum(len(row.ids) for row in rows)
        if context.reservation is not None:
            await context.reservation.tokens(model.name, tokens)
        with record_prompt_usage(context, model.name, tokens):
            scores = await model.scores(rows, caller, context.traceparent)
        return json_response(_results(body, texts, scores, tokens))


def _texts(body: RerankRequest, limit: int) -> list[str]:
    if len(body.documents) > limit:
        raise InvalidRequestError(
            f"At most {limit} documents are allowed; send the others in another request.", param="documents"
        )
    return [document if isinstance(document, str) else document.text for document in body.documents]


def _rows(body: RerankRequest, texts: Sequence[str], model: EncoderModel) -> list[EncoderInput]:
    """Return the encoder's inputs, one per document.

    Documents are cut to the room that the query leaves in the context.

    Raises:
        ContextLengthError: The query is too long.
    """
    minimum = model.tokenizer.min_token_count(body.query, model.card.max_seq_len)
    if minimum > model.card.max_seq_len:
        raise _query_too_long(model, f"at least {minimum}")
    query = model.tokenizer.encode(body.query, add_special_tokens=False)
    room = model.room(len(query))
    if room < 1:
        raise _query_too_long(model, f"{len(query)}")
    limit = min(room, body.max_tokens_per_doc or room)
    cut = [model.tokenizer.encode_beginning(text, limit, add_special_tokens=False)[:limit] for text in texts]
    return model.rows(query, cut)


def _query_too_long(model: EncoderModel, tokens: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {model.card.max_seq_len} tokens, special ones included, but the query "
        f"alone has {tokens}; shorten it.",
        param="query",
    )


def _results(body: RerankRequest, texts: Sequence[str], scores: NDArray[np.float32], tokens: int) -> dict[str, Any]:
    """Return the response, with the most relevant documents first.

    Documents of equal score keep the order of the request.
    """
    relevance = [round(float(score), SCORE_DECIMALS) for score in scores]
    order = sorted(range(len(texts)), key=lambda at: -relevance[at])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": at, "relevance_score": relevance[at]} for at in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "model": body.model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        # Cohere's clients read the token counts from `meta`.
        "meta": {"billed_units": {"input_tokens": tokens}, "tokens": {"input_tokens": tokens, "output_tokens": 0}},
    }
