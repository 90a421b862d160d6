"""GET /replicas: the state of the replicas as this gateway sees it."""

from __future__ import annotations

import os
import socket

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.routing.model_registry import ModelRegistry


class ReplicasEndpoint:
    """The endpoint. `gateways` is a list of one, so that readers can join the answers of several gateways."""

    def __init__(self, catalogue: ModelRegistry) -> None:
        self._catalogue = catalogue

    async def handle(self, request: Request) -> Response:
        own = {
            "gateway": f"{socket.gethostname()}/{os.getpid()}",
            "models": self._catalogue.told(),
            "unreached": self._catalogue.unreached(),
        }
        return JSONResponse({"gateways": [own]})
