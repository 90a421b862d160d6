"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.answers.service import Service
from llmops.gateway.endpoints.common import json_response
from llmops.gateway.fleet.encoders import Embedder, EmbeddingModel
from llmops.gateway.fleet.serving import ServedModel


class ModelList:
    """The endpoints; `handle` lists all models, `handle_one` shows one."""

    def __init__(self, service: Service, embedder: Embedder) -> None:
        self._service, self._embedder = service, embedder

    async def handle(self, request: Request) -> Response:
        models = self._service.models
        data = [describe(model, models.is_ready(model.name)) for model in models.all()]
        data += [self._encoder(model) for model in self._embedder.all()]
        data += [describe_broken(name, problem) for name, problem in self._broken().items()]
        return json_response({"object": "list", "data": data})

    async def handle_one(self, request: Request) -> Response:
        name = request.path_params["model"]
        encoder = next((model for model in self._embedder.all() if model.card.name == name), None)
        if encoder is not None:
            return json_response(self._encoder(encoder))
        broken = self._broken()
        if name in broken:
            return json_response(describe_broken(name, broken[name]))
        models = self._service.models
        return json_response(describe(models.get(name), models.is_ready(name)))

    def _broken(self) -> dict[str, str]:
        """Models that are there and cannot be made, so that nothing else is known of them."""
        known = {model.name for model in self._service.models.all()}
        problems = {**self._service.models.problems(), **self._embedder.problems()}
        return {name: problem for name, problem in problems.items() if name not in known}

    def _encoder(self, model: EmbeddingModel) -> dict[str, Any]:
        return describe_encoder(model, self._embedder.is_ready(model.card.name))


def describe(model: ServedModel, ready: bool) -> dict[str, Any]:
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
        "sampling": {k: v for k, v in asdict(model.card.sampling).items() if v is not None},
        "capabilities": {**asdict(model.card.capabilities), "chat": model.template is not None},
    }


def describe_broken(name: str, problem: str) -> dict[str, Any]:
    """A model that cannot be served, and why."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "llmops", "ready": False, "problem": problem}


def describe_encoder(model: EmbeddingModel, ready: bool) -> dict[str, Any]:
    """The same of an embedding model."""
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.built,
        "owned_by": "llmops",
        "parent": None,
        "root": card.name,
        "max_model_len": card.max_seq_len,
        "ready": ready,
        "target": card.target,
        "capabilities": {"embeddings": True, "dimensions": card.dimensions, "chat": False},
    }
