"""The chat page at `/`, its files, and the session of a browser.

The files are those of `assets/`, without a build step; third-party modules are in `assets/vendor/` as their packages
have them, with their hashes in `vendor.json`. A content security policy lets the page load nothing from elsewhere.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmops.gateway.errors import InvalidRequestError, NotFoundError
from llmops.gateway.http.request_context import context_of
from llmops.gateway.web.browser_security import KEY_COOKIE, bearer_token

ASSETS = Path(__file__).parent / "assets"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_INLINE_SCRIPT = re.compile(rb"<script[^>]*>([^<]+)</script>")
_HEADERS = {
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: Bytes of a cookie that every browser keeps.
MAX_COOKIE_CHARACTERS = 3800


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page, as it is and compressed."""

    data: bytes
    compressed: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.data).hexdigest()[:16]}"'


def add_chat_page(app: FastAPI) -> None:
    """Add the page, its files and the session."""
    hidden: dict[str, Any] = {"include_in_schema": False, "response_model": None}
    app.add_api_route("/", root, methods=["GET", "HEAD"], **hidden)
    app.add_api_route("/assets/{name:path}", asset, methods=["GET", "HEAD"], **hidden)
    app.add_api_route("/api/session", session, methods=["GET"], **hidden)
    app.add_api_route("/api/session", sign_in, methods=["POST"], **hidden)
    app.add_api_route("/api/session", sign_out, methods=["DELETE"], **hidden)


async def root(request: Request) -> Response:
    """Return the page to a browser, and JSON to clients, Claude Code among them, that look whether anyone is there."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"service": "llmops gateway", "documentation": "/docs"})
    return _sent(request, "index.html")


async def asset(request: Request) -> Response:
    """Return a file of the page. Raises NotFoundError."""
    return _sent(request, request.path_params["name"])


async def session(request: Request) -> Response:
    """Say that the caller may use the page; without a key where one is needed, the request does not get here."""
    caller = context_of(request).caller
    return JSONResponse({"object": "session", "signed_in": bool(caller.tenant_id), "admin": "admin" in caller.scopes})


async def sign_in(request: Request) -> Response:
    """Keep the key of this request in a cookie that no script can read.

    Raises:
        InvalidRequestError: The request has no key, or one that no cookie can hold.
    """
    key = bearer_token(request.scope)
    if not key or len(key) > MAX_COOKIE_CHARACTERS or not re.fullmatch(r"[\w.~+/=-]+", key, re.ASCII):
        raise InvalidRequestError("Send the key as `Authorization: Bearer KEY`.", code="no_key")
    answer = await session(request)
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    # without an age: it ends with the browser's session
    answer.set_cookie(KEY_COOKIE, key, path="/", secure=secure, httponly=True, samesite="strict")
    return answer


async def sign_out(request: Request) -> Response:
    answer = JSONResponse({"object": "session", "signed_in": False, "admin": False})
    answer.delete_cookie(KEY_COOKIE, path="/", httponly=True, samesite="strict")
    return answer


@lru_cache(maxsize=1)
def assets() -> dict[str, Asset]:
    """Return the files of the page by their names; read once, less than half a megabyte."""
    found = {}
    for file in sorted(ASSETS.rglob("*")):
        if file.suffix in _TYPES:
            data = file.read_bytes()
            found[file.relative_to(ASSETS).as_posix()] = Asset(data, gzip.compress(data, 9), _TYPES[file.suffix])
    return found


@lru_cache(maxsize=1)
def content_security_policy() -> str:
    """Return the content security policy. The import map is the only inline script, and is named by its hash."""
    scripts = _INLINE_SCRIPT.findall(assets()["index.html"].data)
    hashes = "".join(f" 'sha256-{base64.b64encode(hashlib.sha256(one).digest()).decode()}'" for one in scripts)
    return (
        f"default-src 'none'; script-src 'self'{hashes}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types dompurify"
    )


def _sent(request: Request, name: str) -> Response:
    found = assets().get(name)
    if found is None:
        raise NotFoundError(f"There is no file '{name[:80]}' here; the chat page is at /.")
    headers = {**_HEADERS, "etag": found.etag, "content-security-policy": content_security_policy()}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.compressed, headers={**headers, "content-encoding": "gzip"}, media_type=found.media_type)
    return Response(found.data, headers=headers, media_type=found.media_type)
