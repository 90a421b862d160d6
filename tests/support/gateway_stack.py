"""A gateway over HTTP in front of a scripted Triton: for faults and exact token sequences."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import httpx
import uvicorn
from fastapi import FastAPI

from llmops.gateway.app import create_app
from llmops.gateway.http.server import bind, uvicorn_config
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.waiting import GENEROUS, eventually

#: The token that ends a text.
END = 0

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
#: A small request to each of them.
BODIES = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"model": "tiny", "prompt": "Hello"},
    RESPONSES: {"model": "tiny", "input": "Hello"},
    MESSAGES: {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]},
}


def card_of(tokenizer_dir, tokenizer):
    return {
        "contract": 2, "name": "tiny", "target": "openvino", "tokenizer_dir": str(tokenizer_dir), "max_seq_len": 256,
        "vocab_size": tokenizer.vocab_size, "end_ids": [END], "built": 1790000000,
        "capabilities": {"logprobs": True, "n": 4, "seed": True, "guided": ["json_schema"]},
    }  # fmt: skip


@dataclass
class Stack:
    """A running pair; `say` sets what every request is answered with, token by token."""

    triton: ScriptedTriton
    client: httpx.AsyncClient
    tokenizer: TextTokenizer
    server: uvicorn.Server
    chat_body: dict = field(default_factory=lambda: {**BODIES[CHAT]})

    def say(self, text: str, *rest: Step, end: bool = True, wait: float = 0.0) -> list[int]:
        """`rest` comes after the text in the place of its end."""
        ids = self.tokenizer.encode(text)
        steps = [Step((i,), wait=wait) for i in ids]
        ending = rest or [*([Step((END,))] if end else []), Step(final=True)]
        self.triton.script = lambda tensors: [*steps, *ending]
        return ids

    def steps(self, *steps: Step) -> None:
        self.triton.script = lambda tensors: list(steps)

    async def chat(self, **fields) -> httpx.Response:
        return await self.client.post(CHAT, json={**self.chat_body, **fields})

    async def events(self, path: str = CHAT, **fields) -> list[dict | str]:
        """The data of all events of a streamed answer."""
        body = {**self.chat_body, "stream": True, **fields}
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    async def idle(self, seconds: float = GENEROUS) -> None:
        """Wait until the engine has no request left."""
        await eventually(lambda: self.triton.active == 0, seconds=seconds)


def text_of(events: list) -> str:
    chunks = [event for event in events if isinstance(event, dict) and event.get("choices")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@contextlib.asynccontextmanager
async def app_client(app: FastAPI, url: str = "http://gateway"):
    """The client of an application that is started, without a server."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url=url) as client:
        yield client


@contextlib.asynccontextmanager
async def serving(settings: GatewaySettings, checks=(), plugins=()):
    """A gateway on a free port, as soon as it is ready: its client and server."""
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn_config(create_app(settings, checks=checks, plugins=plugins), settings)
    config.timeout_graceful_shutdown = 2
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        try:
            await _ready(client)
            yield client, server
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def running(card: dict, tokenizer: TextTokenizer, checks=(), **settings):
    async with ScriptedTriton(card, lambda tensors: [Step(final=True)]) as triton:
        given = GatewaySettings(triton=triton.address, refresh="0.1s", **settings)
        async with serving(given, checks) as (client, server):
            yield Stack(triton, client, tokenizer, server)


@contextlib.asynccontextmanager
async def in_front_of(*tritons: ScriptedTriton, refresh: str = "0.1s", checks=(), **settings):
    """A gateway with these servers as its replicas, which start and end with it: its client and server."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = [(await stack.enter_async_context(triton)).address for triton in tritons]
        given = GatewaySettings(replicas=replicas, refresh=refresh, **settings)
        yield await stack.enter_async_context(serving(given, checks))


async def replica_lines(client: httpx.AsyncClient, model: str = "tiny") -> list[dict]:
    """Return what /replicas of a gateway says of each replica of a model."""
    (gateway,) = (await client.get("/replicas")).json()["gateways"]
    return gateway["models"].get(model, [])


async def become(client: httpx.AsyncClient, *states: str, model: str = "tiny") -> None:
    """Wait until the replicas of a model have these states, in the order of their addresses in the settings."""

    async def holds() -> bool:
        return [line["state"] for line in await replica_lines(client, model)] == list(states)

    await eventually(holds)


async def _ready(client: httpx.AsyncClient) -> None:
    async def ready() -> bool:
        with contextlib.suppress(httpx.ConnectError):
            return (await client.get("/health/ready")).status_code == 200
        return False

    await eventually(ready)
