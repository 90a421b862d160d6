"""A gateway that notes every request with its answer's head, and a proxy that notes who wants to leave the machine."""

import asyncio
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from llmops.gateway.app import create_app
from llmops.gateway.http.server import bind, uvicorn_config
from llmops.gateway.settings import GatewaySettings
from tests.support.waiting import wait_until


@dataclass
class Exchange:
    """One request and the head of its answer."""

    method: str
    path: str
    body: dict[str, Any]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class Recording:
    """An ASGI application that notes the requests with a body that pass through it to `app`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, body = Exchange(scope["method"], scope["path"], {}), bytearray()
        self.exchanges.append(exchange)

        async def noting() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body") and body:
                    exchange.body = json.loads(body)
            return message

        async def answering(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            await send(message)

        await self._app(scope, noting, answering)


@contextmanager
def recorded_gateway(triton: str, model: str, **settings: Any) -> Iterator[tuple[str, list[Exchange]]]:
    """Serve a gateway on a free port of loopback. Yields its URL and the list of what it was asked."""
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = GatewaySettings(triton=triton, **settings)
    app = create_app(settings)
    config = uvicorn_config(app, settings)
    config.app = recording = Recording(app)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        wait_until(lambda: httpx.get(f"{url}/v1/models/{model}", timeout=60).status_code == 200)
        recording.exchanges.clear()
        yield url, recording.exchanges
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def no_way_out() -> Iterator[tuple[str, list[str]]]:
    """Serve a proxy that refuses everything. Yields its URL and the list of the first lines that it was sent."""
    asked: list[str] = []

    class Refusing(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode("latin-1").strip())
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()
