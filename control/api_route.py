"""The route class of the control API, with bounded bodies and one-sentence errors."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute, APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from llmops.gateway.http.openapi import ErrorResponse
from llmops.gateway.http.request_body import BodyReader
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Caller
from llmops.gateway.settings import RequestLimits

#: Admin bodies have a few fields, so a body over 64 KiB is a mistake or an attack.
BODY_READER = BodyReader(
    RequestLimits(body_bytes=64 * 2**10),
    timeout=30.0,
    hold=lambda size, context: None,
    turn=lambda share: nullcontext(),
)

#: Number of items of a list that are read at a time. Converting 500 keys blocks the event loop for
#: some 50 ms.
PAGE_SIZE = 500

ItemT = TypeVar("ItemT")

_JSON = (b"content-type", b"application/json")


class ControlRoute(APIRoute):
    """A FastAPI route that is more tolerant of clients and stricter about sizes.

    - A body is parsed as JSON whatever its content type says, is bounded by BODY_READER, and may be
      empty.
    - A list in the query may be written with brackets, as some clients do: `group_by[]=model`.
    """

    async def authorize(self, request: Request) -> None:
        """Raise ForbiddenError if the caller may not use this route.

        Called before the body is read.
        """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the request handler, which FastAPI calls."""
        handle = super().get_route_handler()

        async def run(request: Request) -> Response:
            await self.authorize(request)
            scope, receive = dict(request.scope), request.receive
            scope["query_string"] = _without_brackets(scope["query_string"])
            if self.body_field is not None:
                body = await BODY_READER.read(request) or b"{}"
                scope["headers"] = [*(header for header in scope["headers"] if header[0] != _JSON[0]), _JSON]
                receive = _replay(body)
            return await handle(Request(scope, receive))

        return run


async def _caller(request: Request) -> Caller:
    return context_of(request).caller


# The caller of a request, as a parameter of endpoints.
CurrentCaller = Annotated[Caller, Depends(_caller)]


def make_router(**options: Any) -> APIRouter:
    """Return a router of ControlRoutes, which are named after their functions."""
    options.setdefault("route_class", ControlRoute)
    return APIRouter(
        generate_unique_id_function=lambda route: route.name,
        responses={"4XX": {"model": ErrorResponse, "description": "The request is rejected."}},
        **options,
    )


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Add the routes of a router to an application.

    `include_router` would wrap the routes in a single route without a name, but metrics and error
    messages need the path of each route.
    """
    app.router.routes.extend(router.routes)


async def json_response(make: Callable[[], BaseModel], exclude_unset: bool = False) -> Response:
    """Return a JSON response. A thread encodes it, because a report can have megabytes."""

    def encode() -> bytes:
        return make().model_dump_json(by_alias=True, exclude_unset=exclude_unset).encode()

    content = await asyncio.to_thread(encode)
    return Response(content, media_type="application/json")


async def list_response(
    read: Callable[[ItemT | None, int], Awaitable[Sequence[ItemT]]],
    show: Callable[[ItemT], BaseModel | None],
    limit: int = sys.maxsize,
) -> Response:
    """Return a JSON array whose items are read from the store while the client reads it.

    At any time, memory holds one page of items, even for a client that reads slowly. The first page
    is read before the response begins, so that its errors have an HTTP status.

    Args:
        read: Returns the items after a given item (None for the first page), at most the given
            number of items.
        show: Returns an item in the form of the API, or None to leave the item out.
        limit: Maximum number of items in the array.
    """
    pages = _encoded_pages(read, show, limit)
    first = await anext(pages)

    async def body() -> AsyncIterator[bytes]:
        yield b"[" + first
        is_empty = not first
        async for page in pages:
            if page:
                yield page if is_empty else b"," + page
                is_empty = False
        yield b"]"

    return StreamingResponse(body(), media_type="application/json")


async def _encoded_pages(
    read: Callable[[ItemT | None, int], Awaitable[Sequence[ItemT]]],
    show: Callable[[ItemT], BaseModel | None],
    left: int,
) -> AsyncIterator[bytes]:
    last: ItemT | None = None
    while left:
        size = min(left, PAGE_SIZE)
        page = await read(last, size)
        left = left - size if len(page) == size else 0
        last = page[-1] if page else None
        shown = filter(None, map(show, page))
        part = b",".join([one.model_dump_json(by_alias=True).encode() for one in shown])
        # the page's items are freed while the client reads its text
        del page, shown
        yield part


def _replay(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    """Return an ASGI receive function that returns a body which was already read."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _without_brackets(query: bytes) -> bytes:
    """Return a query string without `[]` at the ends of its parameter names."""
    if b"[]=" not in query and b"%5B%5D=" not in query.upper():
        return query
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return urlencode([(name.removesuffix("[]"), value) for name, value in pairs]).encode()
