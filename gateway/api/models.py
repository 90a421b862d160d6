"""The endpoints GET /v1/models and /v1/models/{id}, in OpenAI's and in Anthropic's format."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import json_response
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.http.anthropic_errors import is_anthropic
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.routing.model_registry import ModelRegistry
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry
from llmops.gateway.routing.replicas.status import summarize_capacity
from llmops.gateway.routing.served_models import Model
from llmops.gateway.schemas.response_schemas import ModelEntries, ModelEntry


class ModelsEndpoint:
    """The endpoints of the list of models, in Anthropic's format for Anthropic's clients."""

    def __init__(self, service: AppState, registry: ModelRegistry, pools: PoolRegistry | None = None) -> None:
        self._service, self._registry, self._pools = service, registry, pools

    def add_routes(self, app: GatewayApp) -> None:
        """Add the routes to `app`."""
        app.add_endpoint("GET", "/v1/models", self.list, "List models", ModelEntries)
        path = {"model": "The model's name."}
        app.add_endpoint("GET", "/v1/models/{model:path}", self.get, "Show a model", ModelEntry, path_parameters=path)

    async def list(self, request: Request) -> Response:
        """Return the models that the caller may use."""
        data = [*self._models(context_of(request)).values()]
        if is_anthropic(request.scope):
            models = [anthropic_model(model) for model in data]
            ids = [model["id"] for model in models] or [None]
            page = {"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
            return json_response(page)
        return json_response({"object": "list", "data": data})

    async def get(self, request: Request) -> Response:
        """Return one model.

        Raises:
            ApiError: The model is unknown or forbidden. A request for a generation would raise the
                same error.
        """
        name, context = request.path_params["model"], context_of(request)
        found = self._models(context).get(name)
        found = found or describe_model(self._service.models.get(name, context.caller), ready=False)
        return json_response(anthropic_model(found) if is_anthropic(request.scope) else found)

    def _models(self, context: RequestContext) -> dict[str, dict[str, Any]]:
        """Return the caller's models by name. Models that cannot be served come last."""
        caller = context.caller
        served = {found.model.name: self._describe(found.model, found.ready) for found in self._registry.all()}
        broken = {name: describe_broken_model(name, problem) for name, problem in self._registry.problems().items()}
        known = {**served, **broken} | served
        entries = {name: entry for name, entry in known.items() if caller.may_use(name)}
        for alias, names in self._registry.aliases.items():
            usable = [served[name] for name in names if name in served]
            overflow = self._service.providers.find(alias, context)
            if overflow is not None and not any(model["ready"] for model in usable):
                usable = [describe_model(overflow, ready=True)]
            if usable and (overflow is not None or any(caller.may_use(name) for name in (alias, *names))):
                entries[alias] = {**usable[0], "id": alias, "alias_of": list(names)}
        return entries

    def _describe(self, model: Model, ready: bool) -> dict[str, Any]:
        """Return the object of a model, with totals over its replicas if it has a pool."""
        pools = self._pools.pools_of(model.parent or model.name) if self._pools is not None else ()
        views = [view for pool in pools for view in pool.views]
        return describe_model(model, ready) | (summarize_capacity(views) if pools else {})


def describe_model(model: Model, ready: bool) -> dict[str, Any]:
    """Return a model's object in OpenAI's format, with additional fields.

    The additional fields include the context length, readiness and abilities.
    """
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
    """Return the object of a model that cannot be served, with the reason."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "llmops", "ready": False, "problem": problem}


def anthropic_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's object in Anthropic's format.

    Args:
        model: The model's object in OpenAI's format.
    """
    length = model.get("max_model_len")
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }
