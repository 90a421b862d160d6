"""The endpoint POST /v1/moderations, which applies the gateway's safety filters."""

import secrets
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import json_response
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.prompt_limits import check_prompt_characters
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import UNKNOWN_CALLER, context_of
from llmops.gateway.interfaces import Caller
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.routing.model_registry import ModelLookup
from llmops.gateway.routing.served_models import EmbeddingModel
from llmops.gateway.safety.filters import JUDGED_TENANT
from llmops.gateway.safety.policy import MAX_JUDGED, Safety
from llmops.gateway.safety.services import Embed, ModerationFilter
from llmops.gateway.schemas.request_fields import RequestModel
from llmops.gateway.schemas.response_schemas import ModerationResponse
from llmops.gateway.text.text_thread_pool import ThreadLane
from llmops.gateway.text.tokenizer import BYTES_PER_TOKEN

#: The categories that OpenAI's responses always contain. OpenAI's SDKs require them.
OPENAI_CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm"),
    *("self-harm/intent", "self-harm/instructions", "sexual", "sexual/minors", "violence", "violence/graphic"),
)

#: Maximum number of passages of a text for which an embedding model works before other texts have
#: their turn.
MAX_PASSAGES = 16


class ModerationText(RequestModel):
    """A text to judge. Other types of input, such as images, are not supported."""

    type: Literal["text"]
    text: str


class ModerationRequest(RequestModel):
    """A request to judge texts with the gateway's safety filters. `model` has no effect."""

    input: str | Annotated[list[str | ModerationText], Field(min_length=1, max_length=64)]
    model: str | None = None


class ModerationsEndpoint:
    """The endpoint that judges texts with all configured safety filters."""

    def __init__(self, service: AppState, safety: Safety) -> None:
        self._service, self._safety = service, safety
        filters = safety.filters.values()
        self._judged = {category for one in filters for category in one.categories}
        if any(isinstance(one, ModerationFilter) for one in filters):
            self._judged.update(OPENAI_CATEGORIES)

    def add_routes(self, app: GatewayApp) -> None:
        """Add the route to `app`."""
        app.add_endpoint(
            "POST", "/v1/moderations", self.create, "Judge texts", ModerationResponse, body=ModerationRequest
        )

    async def create(self, request: Request) -> Response:
        """Return a result for each text, in the order of the texts."""
        body = await self._service.intake.load(ModerationRequest, request)
        parts = [body.input] if isinstance(body.input, str) else body.input
        texts = [one if isinstance(one, str) else one.text for one in parts]
        check_prompt_characters(sum(map(len, texts)), self._service.limits, "input")
        context = context_of(request)
        if context.reservation is not None:
            size = sum(len(text.encode("utf-8", "replace")) for text in texts)
            await context.reservation.tokens("", max(size // BYTES_PER_TOKEN, 1))
        results = [await self._result(text, context.caller) for text in texts]
        return json_response({"id": f"modr-{secrets.token_hex(12)}", "model": "llmops-safety", "results": results})

    async def _result(self, text: str, caller: Caller) -> dict[str, Any]:
        scores = dict.fromkeys([*OPENAI_CATEGORIES, *sorted(self._judged)], 0.0)
        findings = await self._safety.moderate(text, caller)
        flagged = {found.category for found in findings}
        for found in findings:
            scores[found.category] = max(scores.get(found.category, 0.0), found.score)
        return {
            "flagged": bool(findings),
            "categories": {category: category in flagged for category in scores},
            "category_scores": scores,
            # A category that no filter looks for applies to no type of input.
            "category_applied_input_types": {one: ["text"] if one in self._judged | flagged else [] for one in scores},
        }


def text_embedder(models: ModelLookup[EmbeddingModel]) -> Embed:
    """Return a function that turns texts into vectors with this gateway's embedding models.

    Tenants take turns at the model, and so do the texts of a tenant, so that neither many texts nor
    a long text with many passages delay other texts.
    """
    calls, lane, slots = count(), ThreadLane("llmops-encode", 1), FairSlots(MAX_JUDGED)

    async def embed(name: str, texts: Sequence[str]) -> NDArray[np.float32]:
        model, tenant, call = models.get(name, UNKNOWN_CALLER), JUDGED_TENANT.get(), f"text {next(calls)}"
        room = model.card.max_seq_len - model.tokenizer.frame.size

        def encode(part: Sequence[str]) -> list[list[int]]:
            return [model.tokenizer.encode_beginning(text, room, add_special_tokens=False) for text in part]

        vectors = []
        for at in range(0, len(texts), MAX_PASSAGES):
            part = texts[at : at + MAX_PASSAGES]
            async with slots.slot(tenant, len(part), call):
                ids = await lane.run(partial(encode, part), tenant) if model.tokenizer.is_slow else encode(part)
                rows = [model.tokenizer.frame.ids(row) for row in ids]
                vectors.append(await model.embed(rows, call))
        return np.concatenate(vectors)

    return embed
