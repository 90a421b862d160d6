"""The gateway in front of the real Triton with a real model."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import serving

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": "smollm2", "messages": QUESTION, "temperature": 0}


@pytest.fixture
async def client(triton):
    settings = GatewaySettings(triton=triton.grpc_address, refresh="0.5s")
    async with serving(settings) as (client, _):
        yield client


async def streamed(client: httpx.AsyncClient, body: dict) -> list[dict]:
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(chunks: list[dict]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


async def test_the_answer_is_right_and_the_same_streamed(client):
    body = (await client.post(CHAT, json=GREEDY)).json()
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "stop"
    chunks = await streamed(client, {**GREEDY, "stream_options": {"include_usage": True}})
    assert text_of(chunks) == body["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == body["usage"]


async def test_counts_are_the_tokenizers(client):
    body = (await client.post(CHAT, json={**GREEDY, "max_tokens": 50})).json()
    count = (await client.post("/tokenize", json={"model": "smollm2", "messages": QUESTION})).json()["count"]
    assert body["usage"]["prompt_tokens"] == count
    text = body["choices"][0]["message"]["content"]
    told = await client.post("/tokenize", json={"model": "smollm2", "prompt": text, "add_special_tokens": False})
    assert body["usage"]["completion_tokens"] == told.json()["count"]


async def test_a_stop_string_ends_a_stream_as_it_ends_a_plain_answer(client):
    whole = (await client.post(CHAT, json={**GREEDY, "max_tokens": 30})).json()["choices"][0]["message"]["content"]
    for stop in ["Paris", "aris.", "capital of F"]:
        chunks = await streamed(client, {**GREEDY, "max_tokens": 30, "stop": stop})
        assert text_of(chunks) == whole.split(stop)[0]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_length_stop_strings_and_stop_tokens(client):
    cut = (await client.post(CHAT, json={**GREEDY, "max_tokens": 3})).json()
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 3)
    stopped = (await client.post(CHAT, json={**GREEDY, "stop": [" is P"]})).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("The capital of France", "stop")
    of = (await client.post("/tokenize", json={"model": "smollm2", "prompt": " of"})).json()["tokens"]
    ended = (await client.post(CHAT, json={**GREEDY, "stop_token_ids": of})).json()["choices"][0]
    assert (ended["message"]["content"], ended["finish_reason"]) == ("The capital", "stop")


async def test_choices_seeds_and_logprobs(client):
    body = {**GREEDY, "temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 12, "logprobs": True}
    first = (await client.post(CHAT, json=body)).json()
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) > 1
    assert all(entry["logprob"] <= 0 for c in first["choices"] for entry in c["logprobs"]["content"])
    unseeded = {**body, "n": 1}
    del unseeded["seed"]
    answers = [(await client.post(CHAT, json=unseeded)).json()["choices"][0]["message"]["content"] for _ in range(4)]
    assert len(set(answers)) > 1


async def test_a_grammar_holds(client):
    body = {**GREEDY, "guided_regex": "(yes|no), [0-9]{3}", "max_tokens": 20}
    text = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
    assert re.fullmatch("(yes|no), [0-9]{3}", text)


async def test_what_the_target_cannot_do_is_400(client):
    card = (await client.get("/v1/models/smollm2")).json()
    assert card["ready"] is True
    assert card["capabilities"]["logit_bias"] is False
    response = await client.post(CHAT, json={**GREEDY, "logit_bias": {"5": 1}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
