"""GET /replicas: the state of the replicas as this gateway sees it."""

from __future__ import annotations

import os
import socket

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.fleet.catalogue import Catalogue


class Replicas:
    """The endpoint. `gateways` is a list of one, so that readers can join the answers of several gateways."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def handle(self, request: Request) -> Response:
        own = {
            "gateway": f"{socket.gethostname()}/{os.getpid()}",
            "models": self._catalogue.told(),
            "unreached": self._catalogue.unreached(),
        }
        return JSONResponse({"gateways": [own]})
