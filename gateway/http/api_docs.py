"""The API reference: /docs and /redoc, drawn by files that are served here, so that no browser needs a network.

The files are those of the package fastapi-offline; nothing of its code runs.
"""

from __future__ import annotations

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
#: The files of the package that are served, with their media types. Nothing else of its folder is.
ASSET_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "redoc.standalone.js": "text/javascript",
    "favicon.png": "image/png",
}
#: The routes of the reference. They show what is in the source of a release, so no key is asked for.
DOCS_ROUTES = frozenset({"/docs", "/redoc", "/openapi.json", "/docs/{file}"})
# swagger-ui would have a server on the internet judge the document
_SWAGGER = {"validatorUrl": None}


def add_docs_pages(app: FastAPI) -> None:
    """Add the pages of the reference to `app`, and the files that draw them."""

    async def swagger(request: Request) -> Response:
        return get_swagger_ui_html(
            openapi_url=_own(request, "/openapi.json"),
            title=app.title,
            swagger_js_url=_own(request, "/docs/swagger-ui-bundle.js"),
            swagger_css_url=_own(request, "/docs/swagger-ui.css"),
            swagger_favicon_url=_own(request, "/docs/favicon.png"),
            swagger_ui_parameters=_SWAGGER,
        )

    async def redoc(request: Request) -> Response:
        return get_redoc_html(
            openapi_url=_own(request, "/openapi.json"),
            title=app.title,
            redoc_js_url=_own(request, "/docs/redoc.standalone.js"),
            redoc_favicon_url=_own(request, "/docs/favicon.png"),
            with_google_fonts=False,
        )

    for path, endpoint in (("/docs", swagger), ("/redoc", redoc), ("/docs/{file}", docs_asset)):
        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False, response_model=None)


async def docs_asset(request: Request) -> Response:
    """Return one of the files that draw the reference.

    Raises:
        NotFoundError: The file is not one of them.
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


def _own(request: Request, path: str) -> str:
    """Return `path` as a browser asks for it, behind a proxy that adds a prefix as well."""
    return str(request.scope.get("root_path", "")).rstrip("/") + path
