"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.openai.endpoints.common import json_response
from llmops.gateway.openai.service import Service
from llmops.gateway.serving import ServedModel


class ModelList:
    """The endpoints; `handle` lists all models, `handle_one` shows one."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [describe(model) for model in self._service.models.all()]})

    async def handle_one(self, request: Request) -> Response:
        return json_response(describe(self._service.models.get(request.path_params["model"])))


def describe(model: ServedModel) -> dict[str, Any]:
    """OpenAI's model object, with what else a client may want to know."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.card.built,
        "owned_by": "llmops",
        "parent": model.parent,
        "root": model.parent or model.name,
        "max_model_len": model.card.max_seq_len,
        "target": model.card.target,
        "capabilities": {**asdict(model.card.capabilities), "chat": model.template is not None},
    }
