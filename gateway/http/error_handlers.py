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
from llmops.gateway.http import anthropic_errors
from llmops.gateway.http.request_context import context_from_scope, context_of
from llmops.validation_errors import explain_error

log = logging.getLogger(__name__)

# what the usual mistakes with the two SDKs come from
OPENAI_BASE_URL_HINT = "The base URL of OpenAI's clients ends in /v1, without a slash."
ANTHROPIC_BASE_URL_HINT = "The base URL of Anthropic's clients has no /v1 and no slash at its end."

# by class of exception; the answer may have to be awaited
ExceptionHandlers = Mapping[Any, Callable[[Request, Any], Any]]


def add_exception_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _handle_api_error)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error's answer to the request in `scope`; what it does not say goes to the log."""
    log_detail(error)
    if anthropic_errors.is_anthropic(scope):
        request_id = context_from_scope(scope).request_id
        headers = {**error.headers(), anthropic_errors.REQUEST_ID: request_id}
        body = anthropic_errors.envelope_json(error, request_id)
        return Response(body, anthropic_errors.status_of(error), headers, "application/json")
    return Response(error.body_json(), error.status, error.headers(), "application/json")


def openai_error_event(error: ApiError) -> bytes:
    """What clients raise APIError on, in the middle of a stream."""
    log_detail(error)
    return b"data: " + error.body_json() + b"\n\n"


async def _handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        meant = _corrected_path(request)
        hint = f" Did you mean {meant}? {_base_url_hint(meant)}" if meant else _nearest_path_hint(request)
        return error_response(NotFoundError(f"There is no {where}.{hint}"), request.scope)
    if error.status_code == 405:
        headers = dict(error.headers or {})
        refused = MethodNotAllowedError(f"{where} is not possible; use {headers.get('Allow', 'another')}.")
        response = error_response(refused, request.scope)
        response.headers.update(headers)
        return response
    return error_response(InvalidRequestError(str(error.detail)), request.scope)


def _corrected_path(request: Request) -> str:
    """Return the route that a client with a wrong base URL, or a slash at its end, meant; empty when there is none."""
    path = request.url.path
    cleaned = re.sub(r"^(/v1)+(?=/)", "/v1", path.rstrip("/"))
    known = _known_paths(request)
    return next((one for one in (cleaned, f"/v1{cleaned}") if one != path and one in known), "")


def _base_url_hint(path: str) -> str:
    return ANTHROPIC_BASE_URL_HINT if path.startswith("/v1/messages") else OPENAI_BASE_URL_HINT


def _nearest_path_hint(request: Request) -> str:
    """Return a hint at the path that is spelt most like the request's, or at the list of all paths."""
    known = _known_paths(request)
    nearest = difflib.get_close_matches(request.url.path, known, n=1, cutoff=0.85)
    if nearest:
        return f" Did you mean {nearest[0]}?"
    return " GET /docs shows the endpoints." if "/docs" in known else ""


def _known_paths(request: Request) -> set[str]:
    return {*getattr(request.app, "express", ()), *(getattr(route, "path", "") for route in request.app.routes)}


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's own: of routes that have it read their parameters."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(map(str, first["loc"][1:])) or None
    refused = InvalidRequestError(f"Invalid value for '{param}': {explain_error(first)}.", param=param)
    return error_response(refused, request.scope)


async def handle_exception(error: Exception, request: Request, handlers: ExceptionHandlers) -> Response:
    """What the nearest of `handlers` makes of it; that of InternalError where nobody expected it."""
    handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), _handle_unexpected_error)
    made = handler(request, error)
    response: Response = await made if isawaitable(made) else made
    return response


def _handle_unexpected_error(request: Request, error: Exception) -> Response:
    """The log keeps the traceback."""
    context = context_of(request)
    context.finish = "error"
    log.exception("request %s failed", context.request_id, exc_info=error)
    said = f"The gateway failed on this request; its log has request {context.request_id}."
    return error_response(InternalError(said), request.scope)
