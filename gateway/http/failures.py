"""Whatever goes wrong leaves in the error envelope of the API that the client speaks: OpenAI's, or Anthropic's."""

from __future__ import annotations

import logging

from fastapi import FastAPI
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
from llmops.gateway.http.context import RequestContext, context_in

log = logging.getLogger(__name__)


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)


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
        return respond_with(NotFoundError(f"There is no {where}."), request.scope)
    if error.status_code == 405:
        headers = dict(error.headers or {})
        refused = MethodNotAllowedError(f"{where} is not possible; use {headers.get('Allow', 'another')}.")
        response = respond_with(refused, request.scope)
        response.headers.update(headers)
        return response
    return respond_with(InvalidRequestError(str(error.detail)), request.scope)


def bug(context: RequestContext, error: Exception, scope: Scope) -> Response:
    """The answer to an exception that nobody expected; the log keeps the traceback."""
    log.exception("request %s failed", context.request_id, exc_info=error)
    said = f"The gateway failed on this request; its log has request {context.request_id}."
    return respond_with(InternalError(said), scope)
