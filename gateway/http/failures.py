"""Whatever goes wrong leaves in the error envelope of the API that the client speaks: OpenAI's, or Anthropic's."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from llmops.gateway.errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    log_detail,
)
from llmops.gateway.http import anthropic
from llmops.gateway.http.context import context_in, context_of
from llmops.value_errors import explain

log = logging.getLogger(__name__)

# what the usual mistakes with the two SDKs come from
BASE_URL = "The base URL of OpenAI's clients ends in /v1, without a slash."
ANTHROPIC_BASE_URL = "The base URL of Anthropic's clients has no /v1 and no slash at its end."

# by class of exception; the answer may have to be awaited
Handlers = Mapping[Any, Callable[[Request, Any], Any]]


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)


def respond_with(error: ApiError, scope: Scope) -> Response:
    """The error's answer to the request in `scope`; what it does not say goes to the log."""
    log_detail(error)
    if anthropic.is_anthropic(scope):
        request_id = context_in(scope).request_id
        headers = {**error.headers(), anthropic.REQUEST_ID: request_id}
        body = anthropic.envelope_json(error, request_id)
        return Response(body, anthropic.status_of(error), headers, "application/json")
    return Response(error.body_json(), error.status, error.headers(), "application/json")


def error_event(error: ApiError) -> bytes:
    """What clients raise APIError on, in the middle of a stream."""
    log_detail(error)
    return b"data: " + error.body_json() + b"\n\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return respond_with(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        meant = _meant_path(request)
        hint = f" Did you mean {meant}? {_base_url(meant)}" if meant else _nearest_path(request)
        return respond_with(NotFoundError(f"There is no {where}.{hint}"), request.scope)
    if error.status_code == 405:
        headers = dict(error.headers or {})
        refused = MethodNotAllowedError(f"{where} is not possible; use {headers.get('Allow', 'another')}.")
        response = respond_with(refused, request.scope)
        response.headers.update(headers)
        return response
    return respond_with(InvalidRequestError(str(error.detail)), request.scope)


def _meant_path(request: Request) -> str:
    """Return the route that a client with a wrong base URL, or a slash at its end, meant; empty when there is none."""
    path = request.url.path
    cleaned = re.sub(r"^(/v1)+(?=/)", "/v1", path.rstrip("/"))
    known = _known_paths(request)
    return next((one for one in (cleaned, f"/v1{cleaned}") if one != path and one in known), "")


def _base_url(path: str) -> str:
    return ANTHROPIC_BASE_URL if path.startswith("/v1/messages") else BASE_URL


def _nearest_path(request: Request) -> str:
    """Return a hint at the path that is spelt most like the request's, or at the list of all paths."""
    known = _known_paths(request)
    nearest = difflib.get_close_matches(request.url.path, known, n=1, cutoff=0.85)
    if nearest:
        return f" Did you mean {nearest[0]}?"
    return " GET /docs shows the endpoints." if "/docs" in known else ""


def _known_paths(request: Request) -> set[str]:
    return {*getattr(request.app, "express", ()), *(getattr(route, "path", "") for route in request.app.routes)}


async def _invalid(request: Request, error: Exception) -> Response:
    """FastAPI's own: of routes that have it read their parameters."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(map(str, first["loc"][1:])) or None
    refused = InvalidRequestError(f"Invalid value for '{param}': {explain(first)}.", param=param)
    return respond_with(refused, request.scope)


async def answer_to(error: Exception, request: Request, handlers: Handlers) -> Response:
    """What the nearest of `handlers` makes of it; that of InternalError where nobody expected it."""
    handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), _bug)
    made = handler(request, error)
    response: Response = await made if isawaitable(made) else made
    return response


def _bug(request: Request, error: Exception) -> Response:
    """The log keeps the traceback."""
    context = context_of(request)
    context.finish = "error"
    log.exception("request %s failed", context.request_id, exc_info=error)
    said = f"The gateway failed on this request; its log has request {context.request_id}."
    return respond_with(InternalError(said), request.scope)
