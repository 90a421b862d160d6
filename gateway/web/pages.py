"""The chat page at `/`, the administration page at `/admin`, and the browser's session.

The files in `assets/` are served as they are, without a build step. Third-party modules are in
`assets/vendor/`, unchanged, with their hashes in `vendor.json`. A content security policy prevents
the pages from loading anything from other hosts.
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
from starlette.responses import JSONResponse, RedirectResponse, Response

from llmops.gateway.errors import InvalidRequestError, NotFoundError
from llmops.gateway.http.request_context import context_of
from llmops.gateway.web.browser_security import KEY_COOKIE, bearer_token
from llmops.html_pages.elements import PALETTE

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
#: Maximum length of a key, in characters. A cookie with the key fits into the 4096 bytes that every
#: browser allows.
MAX_COOKIE_CHARACTERS = 3800


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the pages.

    Attributes:
        data: The content.
        compressed: The content, compressed with gzip.
        media_type: The media type.
    """

    data: bytes
    compressed: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """Return the entity tag, which is a digest of the content."""
        return f'"{hashlib.sha256(self.data).hexdigest()[:16]}"'


def add_pages(app: FastAPI, *, chat: bool = True, store: bool = True) -> None:
    """Add the pages, their files and the session to `app`.

    Args:
        app: The application.
        chat: True to serve the chat page at `/`. Otherwise, `/` redirects to `/admin`.
        store: True if there is a store, whose keys and usage the administration page shows.
    """
    app.state.administered = store
    hidden: dict[str, Any] = {"include_in_schema": False, "response_model": None}
    app.add_api_route("/", root if chat else to_admin, methods=["GET", "HEAD"], **hidden)
    app.add_api_route("/admin", admin, methods=["GET", "HEAD"], **hidden)
    app.add_api_route("/assets/{name:path}", asset, methods=["GET", "HEAD"], **hidden)
    app.add_api_route("/api/session", session, methods=["GET"], **hidden)
    app.add_api_route("/api/session", sign_in, methods=["POST"], **hidden)
    app.add_api_route("/api/session", sign_out, methods=["DELETE"], **hidden)


async def root(request: Request) -> Response:
    """Return the chat page to browsers, and JSON to other clients.

    Other clients, such as Claude Code, request `/` only to test the connection.
    """
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"service": "llmops gateway", "documentation": "/docs"})
    return _file_response(request, "index.html")


async def to_admin(request: Request) -> Response:
    """Redirect to the administration page."""
    return RedirectResponse("/admin", 307)


async def admin(request: Request) -> Response:
    """Return the administration page. Its data comes from routes that need the scope `admin`."""
    return _file_response(request, "admin.html")


async def asset(request: Request) -> Response:
    """Return a file of the pages.

    Raises:
        NotFoundError: The pages have no such file.
    """
    return _file_response(request, request.path_params["name"])


async def session(request: Request) -> Response:
    """Return the rights of the caller.

    Authentication has already rejected requests that lack a required key.
    """
    caller = context_of(request).caller
    rights = {"signed_in": bool(caller.tenant_id), "admin": "admin" in caller.scopes}
    return JSONResponse({"object": "session", "administered": request.app.state.administered, **rights})


async def sign_in(request: Request) -> Response:
    """Store the key of the request in a cookie that scripts cannot read.

    Raises:
        InvalidRequestError: The request has no key, or a key that does not fit into a cookie.
    """
    key = bearer_token(request.scope)
    if not key or len(key) > MAX_COOKIE_CHARACTERS or not re.fullmatch(r"[\w.~+/=-]+", key, re.ASCII):
        raise InvalidRequestError(
            "The request has no key that fits into a cookie; send it as `Authorization: Bearer KEY`.", code="no_key"
        )
    response = await session(request)
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    # A cookie without an age is deleted when the browser's session ends.
    response.set_cookie(KEY_COOKIE, key, path="/", secure=secure, httponly=True, samesite="strict")
    return response


async def sign_out(request: Request) -> Response:
    """Delete the cookie with the key."""
    response = JSONResponse({"object": "session", "signed_in": False, "admin": False})
    response.delete_cookie(KEY_COOKIE, path="/", httponly=True, samesite="strict")
    return response


@lru_cache(maxsize=1)
def assets() -> dict[str, Asset]:
    """Return the files of the pages by name.

    The files are read once and take less than half a megabyte of memory.
    """
    files = {}
    for file in sorted(ASSETS.rglob("*")):
        if file.suffix in _TYPES:
            data = file.read_bytes()
            files[file.relative_to(ASSETS).as_posix()] = _asset(data, file.suffix)
    files["palette.css"] = _asset(PALETTE.encode(), ".css")
    return files


def _asset(data: bytes, suffix: str) -> Asset:
    return Asset(data, gzip.compress(data, 9), _TYPES[suffix])


@lru_cache(maxsize=1)
def content_security_policy() -> str:
    """Return the content security policy of the pages.

    The policy allows the import map, the only inline script, by its hash.
    """
    pages = (file.data for name, file in assets().items() if name.endswith(".html"))
    scripts = dict.fromkeys(script for page in pages for script in _INLINE_SCRIPT.findall(page))
    hashes = "".join(f" 'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src 'self'{hashes}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types dompurify"
    )


def _file_response(request: Request, name: str) -> Response:
    file = assets().get(name)
    if file is None:
        raise NotFoundError(f"There is no file '{name[:80]}' here; the chat page is at /.")
    headers = {**_HEADERS, "etag": file.etag, "content-security-policy": content_security_policy()}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, headers={**headers, "content-encoding": "gzip"}, media_type=file.media_type)
    return Response(file.data, headers=headers, media_type=file.media_type)
