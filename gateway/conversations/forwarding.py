"""Requests about a response that another worker generates go to that worker, over its Unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmops.gateway.http.caller import HEADER, written
from llmops.gateway.http.context import context_of

_KEPT = ("content-type", "cache-control", "x-accel-buffering", "x-should-retry", "retry-after", "retry-after-ms")
# a stream may be silent for as long as its engine is
_TIMEOUT = httpx.Timeout(10.0, read=None)


async def forward(request: Request, worker: str) -> Response | None:
    """What the worker with that socket answers; None if it is not there any more."""
    context = context_of(request)
    headers = {"x-request-id": context.request_id, HEADER: written(context.caller)}
    client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=worker), timeout=_TIMEOUT)
    url = httpx.URL("http://worker", path=request.url.path, query=request.url.query.encode())
    try:
        answer = await client.send(client.build_request(request.method, url, headers=headers), stream=True)
    except httpx.TransportError:
        await client.aclose()
        return None
    kept = {name: answer.headers[name] for name in _KEPT if name in answer.headers}
    return StreamingResponse(_body(client, answer), answer.status_code, kept)


async def _body(client: httpx.AsyncClient, answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
        await client.aclose()
