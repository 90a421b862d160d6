"""GET /replicas: what each worker of this gateway believes of the replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.fleet.catalogue import Catalogue
from llmops.gateway.observability.combined import OWN, TIMEOUT

log = logging.getLogger(__name__)


class Replicas:
    """The endpoint. Whichever worker is asked asks the others too."""

    def __init__(self, catalogue: Catalogue, siblings: Sequence[Path] = ()) -> None:
        """`siblings`: Unix sockets of the other workers on the same port."""
        self._catalogue, self._siblings = catalogue, siblings

    async def handle(self, request: Request) -> Response:
        own = {
            "gateway": f"{socket.gethostname()}/{os.getpid()}",
            "models": self._catalogue.told(),
            "unreached": self._catalogue.unreached(),
        }
        headers = {name: value for name, value in request.headers.items() if name == "authorization"}
        siblings = () if OWN in request.query_params else self._siblings
        others = await asyncio.gather(*(_ask(one, headers) for one in siblings))
        return JSONResponse({"gateways": [own, *(one for some in others for one in some)]})


async def _ask(path: Path, headers: dict[str, str]) -> list[dict[str, Any]]:
    """A worker that is away is left out."""
    # certificates, which nobody shows here, would take longer to read than the answer
    transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)
    try:
        async with httpx.AsyncClient(transport=transport, timeout=TIMEOUT) as client:
            answer = await client.get(f"http://worker/replicas?{OWN}=1", headers=headers)
        found: list[dict[str, Any]] = answer.raise_for_status().json()["gateways"]
        return found
    except (httpx.HTTPError, ValueError, KeyError) as error:
        log.warning("the worker at %s does not say what it believes: %s", path.name, error or type(error).__name__)
        return []
