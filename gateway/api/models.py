"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.anthropic.model_list import anthropic_model, model_page
from llmops.gateway.api.generation_response import json_response
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.http.anthropic_errors import is_anthropic
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Caller
from llmops.gateway.routing.model_registry import ModelRegistry
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry
from llmops.gateway.routing.replicas.replica_status import summarize_capacity
from llmops.gateway.routing.served_models import Model


class ModelsEndpoint:
    """The endpoints; `handle` lists all models, `handle_one` shows one."""

    def __init__(self, service: AppState, catalogue: ModelRegistry, fleets: PoolRegistry | None = None) -> None:
        self._service, self._catalogue, self._fleets = service, catalogue, fleets

    async def handle(self, request: Request) -> Response:
        data = list(self._described(context_of(request).caller).values())
        if is_anthropic(request.scope):
            return json_response(model_page(data, request.query_params))
        return json_response({"object": "list", "data": data})

    async def handle_one(self, request: Request) -> Response:
        name, caller = request.path_params["model"], context_of(request).caller
        # a name that nobody knows, or that is not the caller's, raises what any request for it would
        found = self._described(caller).get(name) or describe_model(self._service.models.get(name, caller), ready=False)
        return json_response(anthropic_model(found) if is_anthropic(request.scope) else found)

    def _described(self, caller: Caller) -> dict[str, dict[str, Any]]:
        """The caller's, by name; those that cannot be made come last, as nothing else is known of them."""
        known = {found.model.name: self._describe(found.model, found.ready) for found in self._catalogue.all()}
        broken = {name: describe_broken_model(name, problem) for name, problem in self._catalogue.problems().items()}
        return {name: entry for name, entry in ({**known, **broken} | known).items() if caller.may_use(name)}

    def _describe(self, model: Model, ready: bool) -> dict[str, Any]:
        """With the sums over its replicas, where there are several."""
        fleet = self._fleets.fleets.get(model.parent or model.name) if self._fleets is not None else None
        return describe_model(model, ready) | (summarize_capacity(fleet.views) if fleet is not None else {})


def describe_model(model: Model, ready: bool) -> dict[str, Any]:
    """OpenAI's model object, with what else a client may want to know."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.card.built,
        "owned_by": "llmops",
        "parent": model.parent,
        "root": model.parent or model.name,
        "max_model_len": model.card.max_seq_len,
        "ready": ready,
        "target": model.card.target,
        **model.abilities(),
    }


def describe_broken_model(name: str, problem: str) -> dict[str, Any]:
    """A model that cannot be served, and why."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "llmops", "ready": False, "problem": problem}
