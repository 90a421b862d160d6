"""What `llmops control` serves, asked of a gateway without it: who calls there is told where it is."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request

from llmops.gateway.errors import NotFoundError

CONTROL_PATHS = ("/api/usage", "/api/models", "/api/admin/{rest:path}", "/v1/organization/{rest:path}")
CONTROL_METHODS = ("GET", "POST", "PATCH", "DELETE")


def add_control_routes(app: FastAPI) -> None:
    for path in CONTROL_PATHS:
        app.add_api_route(
            path, control_route_missing, methods=list(CONTROL_METHODS), include_in_schema=False, response_model=None
        )


async def control_route_missing(request: Request) -> None:
    """Raises NotFoundError."""
    raise NotFoundError(
        f"This gateway does not have {request.method} {request.url.path}; `llmops control --store …` has, on a port of "
        "its own, and so does `llmops up --store …`."
    )
