"""The short way past FastAPI is one only as long as nobody put something in it."""

from __future__ import annotations

import httpx
import pytest

from llmops.gateway.app import create_app
from llmops.gateway.settings import GatewaySettings

POSTS = ["chat/completions", "completions", "embeddings", "responses"]


def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway/v1/")


@pytest.fixture
def app():
    return create_app(GatewaySettings(triton="127.0.0.1:1"))


async def test_the_long_way_answers_the_same(app):
    """The long way answers the same, except for values that change with each request."""
    for path in [*POSTS, "nothing"]:
        asked = {
            "json": {"model": "none", "input": "x", "prompt": "x", "messages": []},
            "headers": {"x-request-id": "same"},
        }
        short = await client(app).post(path, **asked)
        assert (f"/v1/{path}" in app.fast_routes) is (path != "nothing")
        fast_routes, app.fast_routes = app.fast_routes, {}
        long = await client(app).post(path, **asked)
        app.fast_routes = fast_routes
        assert (short.status_code, short.json()) == (long.status_code, long.json())
        assert set(short.headers) == set(long.headers)
        assert short.headers["x-request-id"] == "same"
