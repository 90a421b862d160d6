"""What every API of the gateway can say, in Anthropic's form: an error, an error in a stream, a sign of life."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Scope

from llmops.gateway.errors import ApiError, log_detail

PATH = "/v1/messages"
_VERSION = b"anthropic-version"
# the header by which its clients name a request
REQUEST_ID = "request-id"

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

# Anthropic's own status for "too much at once"; its clients know it from "not there"
OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def is_anthropic(scope: Scope) -> bool:
    """Whether the client speaks Anthropic's API: by the path, or by the header that all of its clients send."""
    return scope["path"].startswith(PATH) or _VERSION in dict(scope["headers"])


def status_of(error: ApiError) -> int:
    """The error's status, but that a full queue has one of its own."""
    return OVERLOADED if error.code == "overloaded" else error.status


def envelope(error: ApiError, request_id: str) -> dict[str, Any]:
    """Its `type` follows from the status; `param` has no place in it."""
    status = status_of(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": error.body()["error"]["message"]}
    if error.code is not None:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": request_id}


def envelope_json(error: ApiError, request_id: str) -> bytes:
    return json.dumps(envelope(error, request_id), ensure_ascii=False).encode("utf-8", "replace")


def error_event(error: ApiError, request_id: str) -> bytes:
    """An error in the middle of a stream, which ends with it."""
    log_detail(error)
    return b"event: error\ndata: " + envelope_json(error, request_id) + b"\n\n"
