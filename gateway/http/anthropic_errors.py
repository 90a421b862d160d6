"""Errors in the format of Anthropic's API.

Every layer can raise an error, so the format is not part of `api/anthropic`.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Scope

from llmops.gateway.errors import ApiError

_PATH_PREFIX = "/v1/messages"
_VERSION_HEADER = b"anthropic-version"
#: Name of the response header from which Anthropic's clients read the request id.
REQUEST_ID_HEADER = "request-id"

#: Anthropic's status for an overloaded server, which its clients distinguish from 503
#: (unavailable).
OVERLOADED = 529
_ERROR_TYPES = {
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
    """Return True if the client speaks Anthropic's API.

    Such a request has a path of the API, or the header `anthropic-version`, which all of
    Anthropic's clients send.
    """
    return scope["path"].startswith(_PATH_PREFIX) or _VERSION_HEADER in dict(scope["headers"])


def status_of(error: ApiError) -> int:
    """Return the HTTP status of `error`, which is 529 if the gateway is overloaded."""
    return OVERLOADED if error.code == "overloaded" else error.status


def envelope_json(error: ApiError, request_id: str) -> bytes:
    """Return the JSON body of an error response.

    `type` follows from the status. Anthropic's format has no field for `param`.
    """
    status = status_of(error)
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details: dict[str, Any] = {"type": kind, "message": error.body()["error"]["message"]}
    if error.code is not None:
        details["details"] = {"error_code": error.code}
    envelope = {"type": "error", "error": details, "request_id": request_id}
    return json.dumps(envelope, ensure_ascii=False).encode("utf-8", "replace")
