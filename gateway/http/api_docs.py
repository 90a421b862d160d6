"""The API reference: /docs, /redoc and /openapi.json.

The gateway serves the scripts of the reference itself, so that the reference works without internet
access. The scripts belong to the package fastapi-offline, whose Python code is not run.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import TYPE_CHECKING

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from fastapi import FastAPI

#: Routes of the reference, which require no API key: they show only what a release's source code
#: shows.
DOCS_ROUTES = frozenset({"/docs", "/redoc", "/openapi.json"})
# By default, swagger-ui sends the document to a validator on the internet.
_SWAGGER = {"validatorUrl": None}


def add_docs_pages(app: FastAPI) -> None:
    """Add the OpenAPI document, the pages of the reference and their files to `app`."""

    @cache
    def encoded_document() -> bytes:
        # Encoding takes 3 ms, and clients without a key can request the document.
        return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    # Creating the first document takes 0.3 s in a thread. Concurrent requests wait for the result.
    making = asyncio.Lock()

    async def document(_request: Request) -> Response:
        async with making:
            encoded = await asyncio.to_thread(encoded_document)
        return Response(encoded, media_type="application/json")

    async def swagger(_request: Request) -> Response:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
            swagger_ui_parameters=_SWAGGER,
        )

    async def redoc(_request: Request) -> Response:
        return get_redoc_html(
            openapi_url="openapi.json",
            title=app.title,
            redoc_js_url="docs/redoc.standalone.js",
            redoc_favicon_url="docs/favicon.png",
            with_google_fonts=False,
        )

    for path, endpoint in {"/openapi.json": document, "/docs": swagger, "/redoc": redoc}.items():
        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False, response_model=None)
    app.mount("/docs", StaticFiles(packages=[("fastapi_offline", "static")]))
