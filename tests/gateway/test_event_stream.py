"""The order of what goes to the socket by plain calls and by the stream's coroutine, on a real server."""

import asyncio
import contextlib
import gc
import weakref
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
import uvicorn
from starlette.responses import Response

from llmops.gateway.generation.answer import Answer
from llmops.gateway.http.chunked_writer import ChunkedWriter, WriteBatch
from llmops.gateway.http.middleware import RequestMiddleware
from llmops.gateway.http.sse import EventSource, EventStreamResponse
from llmops.gateway.settings import GatewaySettings, Timeouts
from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.gateway_stack import Stack, card_of, serving
from tests.support.scripted_triton import ScriptedTriton
from tests.support.waiting import eventually


class Ending(EventSource):
    """Wakes its reader before it writes the last event, both in one turn of the loop: as a stop string does."""

    def __init__(self) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        self._ends = [b"data: [DONE]\n\n", None]

    async def next(self) -> bytes | None:
        await self._woken
        return self._ends.pop(0)

    def attach(self, writer: ChunkedWriter) -> None:
        asyncio.get_running_loop().call_later(0.01, self._finish, writer)

    def _finish(self, writer: ChunkedWriter) -> None:
        self._woken.set_result(None)
        writer.write(b"data: last\n\n")

    def cancel(self) -> None:
        return

    close = cancel


async def app(scope, receive, send) -> None:
    if scope["type"] == "http":
        source, watch = AsyncMock(side_effect=Ending), Mock()
        answer: Response = EventStreamResponse(source, watch, Timeouts(keepalive=0))
        await answer(scope, receive, send)


async def test_the_end_never_overtakes_what_was_written_before():
    door = RequestMiddleware(app, lambda scope: "")
    server = uvicorn.Server(uvicorn.Config(door, port=0, http="httptools", lifespan="off", log_level="error"))
    running = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        # a second one on the same connection reads whatever came after the end of the first
        for _ in range(2):
            assert (await client.get("/")).text == "data: last\n\ndata: [DONE]\n\n"
    server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_client_that_has_left_takes_nothing_from_others():
    """A closed connection in a batch of writes does not affect the other connections.

    The batch is everything that one engine step sends.
    """
    burst, written = WriteBatch(), []

    def closed(data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    burst.add(written.append, b"first")
    burst.add(closed, b"lost")
    burst.add(written.append, b"second")
    burst.flush()
    assert written == [b"first", b"second"]


async def test_a_streamed_answer_is_free_when_it_ends(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the fix, its request's body stayed in memory until Python collected cycles."""
    tokenizer, ended, close = TextTokenizer(tokenizer_dir), [], Answer.close
    monkeypatch.setattr(Answer, "close", lambda answer: (ended.append(weakref.ref(answer)), close(answer))[1])
    triton = ScriptedTriton(card_of(tokenizer_dir, tokenizer), lambda tensors: [])
    async with triton, serving(GatewaySettings(replicas=[triton.address], refresh="600s")) as (client, server):
        stack = Stack(triton, client, tokenizer, server)
        stack.say("The quick brown fox jumps over the lazy dog.", wait=0.005)
        gc.collect()
        gc.disable()
        try:
            assert (await stack.events())[-1] == "[DONE]"
            await eventually(lambda: ended and not any(answer() for answer in ended), seconds=5)
        finally:
            gc.enable()
