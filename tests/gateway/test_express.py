"""The short way past FastAPI is one only as long as nobody put something in it."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import PlainTextResponse

from llmops.gateway.app import create_app
from llmops.gateway.errors import ApiError
from llmops.gateway.settings import GatewaySettings

POSTS = ["chat/completions", "completions", "embeddings", "responses"]


def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway/v1/")


@pytest.fixture
def app():
    return create_app(GatewaySettings(triton="127.0.0.1:1"))


@pytest.mark.parametrize("path", [*POSTS, "nothing"])
async def test_the_long_way_answers_the_same(app, path):
    """The long way answers the same, except for values that change with each request."""
    asked = {
        "json": {"model": "none", "input": "x", "prompt": "x", "messages": []},
        "headers": {"x-request-id": "same"},
    }
    short = await client(app).post(path, **asked)
    assert (f"/v1/{path}" in app.fast_routes) is (path != "nothing")
    app.fast_routes = {}
    long = await client(app).post(path, **asked)
    assert (short.status_code, short.json()) == (long.status_code, long.json())
    assert set(short.headers) == set(long.headers)
    assert short.headers["x-request-id"] == "same"


@pytest.mark.parametrize("path", POSTS)
async def test_a_middleware_that_is_added_sees_them_too(app, path):
    class Closed:
        def __init__(self, app) -> None:
            pass

        async def __call__(self, scope, receive, send) -> None:
            await PlainTextResponse("closed", 401)(scope, receive, send)

    app.add_middleware(Closed)
    assert (await client(app).post(path, json={})).status_code == 401


async def test_a_handler_that_is_added_hears_of_them_too(app):
    async def tea(request, error):
        return PlainTextResponse("tea", 418)

    app.add_exception_handler(ApiError, tea)
    assert (await client(app).post("chat/completions", json={})).status_code == 418


async def test_other_methods_and_paths_get_openai_s_errors(app):
    async with client(app) as asked:
        wrong = await asked.get("chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert (await asked.post("chat/completions/", json={})).status_code == 404
