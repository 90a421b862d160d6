"""The API reference: /docs, /redoc and /openapi.json.

The gateway serves the scripts of the reference itself, so that the reference works without internet
access. The scripts belong to the package fastapi-offline, whose Python code is not run.
"""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from llmops.gateway.errors import NotFoundError

if TYPE_CHECKING:
    from fastapi import FastAPI

ASSETS_PACKAGE = "fastapi_offline"
#: Media types of the files that are served, by file name. Other files of the package are not
#: served.
ASSET_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "redoc.standalone.js": "text/javascript",
    "favicon.png": "image/png",
}
#: Routes of the reference, which require no API key: they show only what a release's source code
#: shows.
DOCS_ROUTES = frozenset({"/docs", "/redoc", "/openapi.json", "/docs/{file}"})
# By default, swagger-ui sends the document to a validator on the internet.
_SWAGGER = {"validatorUrl": None}


def add_docs_pages(app: FastAPI) -> None:
    """Add the OpenAPI document, the pages of the reference and their files to `app`."""

    @lru_cache(maxsize=1)
    def encoded_document(root_path: str) -> bytes:
        # Encoding takes 3 ms, and clients without a key can request the document.
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return json.dumps({**app.openapi(), **servers}, ensure_ascii=False, separators=(",", ":")).encode()

    # Creating the first document takes 0.3 s in a thread. Concurrent requests wait for the result.
    making = asyncio.Lock()

    async def document(request: Request) -> Response:
        async with making:
            encoded = await asyncio.to_thread(encoded_document, _with_root_path(request, ""))
        return Response(encoded, media_type="application/json")

    async def swagger(request: Request) -> Response:
        return get_swagger_ui_html(
            openapi_url=_with_root_path(request, "/openapi.json"),
            title=app.title,
            swagger_js_url=_with_root_path(request, "/docs/swagger-ui-bundle.js"),
            swagger_css_url=_with_root_path(request, "/docs/swagger-ui.css"),
            swagger_favicon_url=_with_root_path(request, "/docs/favicon.png"),
            swagger_ui_parameters=_SWAGGER,
        )

    async def redoc(request: Request) -> Response:
        return get_redoc_html(
            openapi_url=_with_root_path(request, "/openapi.json"),
            title=app.title,
            redoc_js_url=_with_root_path(request, "/docs/redoc.standalone.js"),
            redoc_favicon_url=_with_root_path(request, "/docs/favicon.png"),
            with_google_fonts=False,
        )

    routes = {"/openapi.json": document, "/docs": swagger, "/redoc": redoc, "/docs/{file}": docs_asset}
    for path, endpoint in routes.items():
        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False, response_model=None)


async def docs_asset(request: Request) -> Response:
    """Return a script, style sheet or icon of the reference.

    Raises:
        NotFoundError: The reference has no such file.
    """
    name = request.path_params["file"]
    if name not in ASSET_FILES:
        raise NotFoundError(f"There is no file '{name}' here; the reference is at /docs and /redoc.")
    return FileResponse(_folder() / name, media_type=ASSET_FILES[name])


def _folder() -> Path:
    spec = find_spec(ASSETS_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("static")


def _with_root_path(request: Request, path: str) -> str:
    """Return `path` with the prefix that a proxy adds, as browsers must request it."""
    return str(request.scope.get("root_path", "")).rstrip("/") + path
