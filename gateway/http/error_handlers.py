"""Conversion of exceptions to responses, in the error format of the client's API.

The formats are OpenAI's and Anthropic's.
"""

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
from starlette.routing import Match
from starlette.types import Scope

from llmops.gateway.errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    log_detail,
    missing_parameter,
)
from llmops.gateway.http import anthropic_errors
from llmops.gateway.http.request_context import context_of
from llmops.validation_errors import explain_error

log = logging.getLogger(__name__)

# Hints at the usual mistake in the configuration of each of the two SDKs.
OPENAI_BASE_URL_HINT = "The base URL of OpenAI's clients ends in /v1, without a slash."
ANTHROPIC_BASE_URL_HINT = "The base URL of Anthropic's clients has no /v1 and no slash at its end."

_NOT_AN_OBJECT = "The body is not a valid JSON object; send one, with names and texts in double quotes."

#: Exception handlers by class of exception. A handler returns a response or an awaitable of a
#: response.
ExceptionHandlers = Mapping[Any, Callable[[Request, Any], Any]]


def add_exception_handlers(app: FastAPI) -> None:
    """Add handlers for ApiError and for the exceptions of Starlette and FastAPI to `app`."""
    app.add_exception_handler(ApiError, _handle_api_error)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response for `error` in the client's format, and log its detail."""
    log_detail(error)
    if anthropic_errors.is_anthropic(scope):
        request_id = context_of(scope).request_id
        headers = {**error.headers(), anthropic_errors.REQUEST_ID_HEADER: request_id}
        body = anthropic_errors.envelope_json(error, request_id)
        return Response(body, anthropic_errors.status_of(error), headers, "application/json")
    return Response(error.body_json(), error.status, error.headers(), "application/json")


async def handle_exception(error: Exception, request: Request, handlers: ExceptionHandlers) -> Response:
    """Return the response of the most specific handler for `error`.

    Without a handler, log the traceback and return a response with status 500.
    """
    handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), _handle_unexpected_error)
    result = handler(request, error)
    response: Response = await result if isawaitable(result) else result
    return response


async def _handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    """Handle Starlette's errors for a path without a route and for a method that no route has."""
    assert isinstance(error, HTTPException)
    operation = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(NotFoundError(f"There is no {operation}.{_path_hint(request)}"), request.scope)
    if error.status_code == 405:
        allowed = _allowed_methods(request)
        wrong = MethodNotAllowedError(f"{operation} is not possible; use {' or '.join(allowed) or 'another method'}.")
        response = error_response(wrong, request.scope)
        response.headers.update({**(error.headers or {}), **({"Allow": ", ".join(allowed)} if allowed else {})})
        return response
    # FastAPI's answer to a body whose encoding or depth Python's JSON parser rejects
    return error_response(InvalidRequestError(_NOT_AN_OBJECT), request.scope)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes that have the requested path.

    Starlette's error names only the methods of the first such route.
    """
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE)
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


_NO_CONTROL = "It belongs to `llmops control`: start that, or `llmops up`, with a store (--store URL)."
#: Beginnings of paths that exist only with some settings, and advice for a gateway without these
#: settings.
_OPTIONAL_PATHS = {
    "/v1/moderations": "This gateway has no safety filters. Its operator can add some (docs/safety.md).",
    **dict.fromkeys(("/api/usage", "/api/models", "/api/admin", "/api/rollouts", "/v1/organization"), _NO_CONTROL),
}


def _path_hint(request: Request) -> str:
    """Return a hint at the path that the client probably meant, or at the list of endpoints."""
    path = request.url.path
    known = {getattr(route, "path", "") for route in request.app.routes}
    # A client with a wrong base URL doubles or omits /v1, or appends a slash.
    cleaned = re.sub(r"^(/v1)+(?=/)", "/v1", path.rstrip("/"))
    corrected = next((one for one in (cleaned, f"/v1{cleaned}") if one != path and one in known), None)
    if corrected is not None:
        hint = ANTHROPIC_BASE_URL_HINT if corrected.startswith("/v1/messages") else OPENAI_BASE_URL_HINT
        return f" Did you mean {corrected}? {hint}"
    nearest = difflib.get_close_matches(path, known, n=1, cutoff=0.85)
    if nearest:
        return f" Did you mean {nearest[0]}?"
    for prefix, reason in _OPTIONAL_PATHS.items():
        if path.startswith(prefix) and not any(one.startswith(prefix) for one in known):
            return f" {reason}"
    return " GET /docs shows the endpoints." if "/docs" in known else ""


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    """Handle FastAPI's validation errors, for routes whose parameters FastAPI reads."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:]).lstrip(".")
    if first["type"] == "missing":
        invalid = missing_parameter(param)
    elif first["type"] == "json_invalid" or not param:
        invalid = InvalidRequestError(_NOT_AN_OBJECT)
    else:
        code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
        invalid = InvalidRequestError(f"Invalid value for '{param}': {explain_error(first)}.", param=param, code=code)
    return error_response(invalid, request.scope)


def _handle_unexpected_error(request: Request, error: Exception) -> Response:
    """Log the traceback, and return a response without details."""
    context = context_of(request)
    context.finish_reason = "error"
    log.exception(
        "Request %s failed because of an unexpected error; its client receives status 500",
        context.request_id,
        exc_info=error,
    )
    message = f"The gateway failed on this request. If it fails again, tell the operator its id: {context.request_id}."
    return error_response(InternalError(message), request.scope)
