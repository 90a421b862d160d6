"""A gateway over HTTP in front of a scripted Triton: for faults and exact token sequences."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmops.gateway.app import create_app
from llmops.gateway.http.server import bind, uvicorn_config
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.text.tokenizer import TextTokenizer

# tests have no package, so that two checkouts can run them at once; a helper module is loaded by path
for _name in ("scripted_triton", "anthropic_sdk", "otlp_receiver"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])

from scripted_triton import ScriptedTriton, Step  # noqa: E402

sys.modules["gateway_conftest"] = sys.modules[__name__]  # for the helpers that tests import

# seconds that a test waits for what is to come: only those that fail take it
GENEROUS = 90.0
END = 0
CORPUS = ["The capital of France is Paris.", "Hello world! How are you?", "<answer>42</answer>", "你好 🙂 é"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def patient_with_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no store and no provider that is away."""
    for place in (
        "auth.keys.STORE_TIMEOUT",
        "auth.jwks.FETCH_TIMEOUT",
        "usage.billing.STORE_TIMEOUT",
        "usage.usage_check.DRAIN_TIMEOUT",
    ):
        monkeypatch.setattr(f"llmops.gateway.{place}", GENEROUS)


@pytest.fixture(autouse=True)
def own_conversations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Conversations of gateways without a store are each test's own."""
    monkeypatch.setattr("llmops.gateway.api.conversation_routes.cache_dir", lambda: tmp_path)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return TextTokenizer(tokenizer_dir)


@pytest.fixture
def card(tokenizer_dir, tokenizer):
    return card_of(tokenizer_dir, tokenizer)


def card_of(tokenizer_dir, tokenizer):
    return {
        "contract": 2,
        "name": "tiny",
        "target": "openvino",
        "tokenizer_dir": str(tokenizer_dir),
        "max_seq_len": 256,
        "vocab_size": tokenizer.vocab_size,
        "end_ids": [END],
        "capabilities": {"logprobs": True, "n": 4, "seed": True, "guided": ["json_schema"]},
        "built": 1790000000,
    }


@dataclass
class Stack:
    """A running pair; `say` sets what every request is answered with, token by token."""

    triton: ScriptedTriton
    client: httpx.AsyncClient
    tokenizer: TextTokenizer
    server: uvicorn.Server
    chat_body: dict = field(
        default_factory=lambda: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    )

    def say(self, text: str, *, end: bool = True, wait: float = 0.0) -> list[int]:
        ids = self.tokenizer.encode(text)
        steps = [Step((i,), wait=wait) for i in ids]
        self.triton.script = lambda tensors: [*steps, *([Step((END,))] if end else []), Step(final=True)]
        return ids

    def steps(self, *steps: Step) -> None:
        self.triton.script = lambda tensors: list(steps)

    async def chat(self, **fields) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={**self.chat_body, **fields})

    async def events(self, path: str = "/v1/chat/completions", **fields) -> list[dict | str]:
        """The data of all events of a streamed answer."""
        body = {**self.chat_body, "stream": True, **fields}
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def idle(self, seconds: float = GENEROUS) -> None:
        """Wait until the engine has no request left."""
        await eventually(lambda: self.triton.active == 0, seconds)


def text_of(events: list) -> str:
    chunks = [event for event in events if isinstance(event, dict) and event.get("choices")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@contextlib.asynccontextmanager
async def serving(settings: GatewaySettings, checks=()):
    """A gateway on a free port, as soon as it is ready: its client and server."""
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn_config(create_app(settings, checks=checks), settings)
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
    triton = ScriptedTriton(card, lambda tensors: [Step(final=True)])
    await triton.start()
    try:
        given = GatewaySettings(triton=f"127.0.0.1:{triton.port}", refresh="0.1s", **settings)
        async with serving(given, checks) as (client, server):
            yield Stack(triton, client, tokenizer, server)
    finally:
        await triton.stop()


async def eventually_async(holds, seconds: float = GENEROUS) -> None:
    """The same for a condition that has to be awaited."""
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.05)


async def eventually(holds, seconds: float = GENEROUS) -> None:
    """Wait until `holds()`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.005)


async def _ready(client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + GENEROUS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.ConnectError):
            if (await client.get("/health/ready")).status_code == 200:
                return
        await asyncio.sleep(0.02)
    raise AssertionError("the gateway did not become ready")


@pytest.fixture
async def stack(card, tokenizer):
    async with running(card, tokenizer) as one:
        yield one
