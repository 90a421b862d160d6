"""Whatever goes wrong leaves as OpenAI's error envelope."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    log_detail,
)
from llmops.gateway.http.context import RequestContext

log = logging.getLogger(__name__)


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)


def respond_with(error: ApiError) -> Response:
    """The error's answer; what it does not say goes to the log."""
    log_detail(error)
    return Response(error.body_json(), error.status, error.headers(), "application/json")


def error_event(error: ApiError) -> bytes:
    """What clients raise APIError on, in the middle of a stream."""
    log_detail(error)
    return b"data: " + error.body_json() + b"\n\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return respond_with(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return respond_with(NotFoundError(f"There is no {where}."))
    if error.status_code == 405:
        headers = dict(error.headers or {})
        response = respond_with(
            MethodNotAllowedError(f"{where} is not possible; use {headers.get('Allow', 'another')}.")
        )
        response.headers.update(headers)
        return response
    return respond_with(InvalidRequestError(str(error.detail)))


def bug(context: RequestContext, error: Exception) -> Response:
    """The answer to an exception that nobody expected; the log keeps the traceback."""
    log.exception("request %s failed", context.request_id, exc_info=error)
    return respond_with(InternalError(f"The gateway failed on this request; its log has request {context.request_id}."))
