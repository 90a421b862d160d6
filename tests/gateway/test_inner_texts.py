"""Tests that an engine's internal messages never reach a client.

The log has them under the request's id.
"""

import itertools
import json
import logging

import pytest

from llmops.gateway.logging_setup import REQUEST_LINES
from tests.support.scripted_triton import Step

SECRETS = [
    "Failed to initialize Python stub: /dev/shm/llmops_4711_region: No space left on device",
    "Traceback (most recent call last):\n  File '/opt/engine/model.py', line 3\nKeyError: 'x'",
    "std::bad_alloc in tensorrt_llm::batch_manager at kvCacheManager.cpp:512",
    "input_ids: cudaMalloc failed in /src/cpp/runtime/buffers.cu:77 at 0x7f3a",
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.3.7:8001: unavailable",
]
INSIDES = ["llmops_4711", "/opt/engine", "Traceback", "bad_alloc", "kvCache", "buffers.cu", "10.0.3.7", "/dev/shm"]
TEXT = ("/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 8})
CHAT = ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]})
RESPONSE = ("/v1/responses", {"model": "tiny", "input": "Hello"})


def check(text: str, request_id: str, caplog, said: str) -> None:
    assert [inside for inside in INSIDES if inside in text] == []
    logged = [record.getMessage() for record in caplog.records if said in record.getMessage()]
    assert len(logged) == 1, logged
    assert (request_id in logged[0], request_id in text) == (True, True)


@pytest.mark.parametrize(
    ("before", "stream", "statuses"),
    [([], False, [400, 500, 503]), ([], True, [400, 500, 503]), ([Step((70,)), Step((71,))], True, [200])],
)
async def test_before_the_first_token_and_in_the_middle_of_a_stream(stack, caplog, before, stream, statuses):
    for said, (path, body) in itertools.product(SECRETS, [TEXT, CHAT, RESPONSE]):
        caplog.clear()
        REQUEST_LINES._last.clear()
        stack.steps(*before, Step(error=said))
        asked = {"json": {**body, "stream": stream}, "headers": {"x-request-id": "req-77"}}
        with caplog.at_level(logging.INFO):
            answer = await stack.client.post(path, **asked)
        assert answer.status_code in statuses
        check(answer.text, "req-77", caplog, said)


async def test_a_response_in_the_background_and_read_later(stack, caplog):
    said = SECRETS[0]
    stack.steps(Step((70,)), Step(error=said))
    path, body = RESPONSE
    with caplog.at_level(logging.INFO):
        made = await stack.client.post(path, json={**body, "background": True}, headers={"x-request-id": "req-79"})
        url = f"{path}/{made.json()['id']}"
        while (answer := await stack.client.get(url)).json()["status"] in ("in_progress", "queued"):
            pass
    assert answer.json()["status"] == "failed"
    check(answer.text, "req-79", caplog, said)


async def test_a_broken_connection(stack, caplog):
    stack.steps(Step((70,)), Step(drop=True))
    with caplog.at_level(logging.INFO):
        answer = await stack.client.post(CHAT[0], json=CHAT[1])
    assert (answer.status_code, "connection lost" in answer.text) == (503, False)
    assert "connection lost" in caplog.text


async def test_no_address_of_triton_while_it_is_away(stack):
    address = f"127.0.0.1:{stack.triton.port}"
    await stack.triton.stop()
    texts = [(await stack.client.get(path)).text for path in ("/health/ready", "/v1/models", "/v1/models/other")]
    texts.append((await stack.client.post(CHAT[0], json=CHAT[1])).text)
    texts.append((await stack.client.post("/v1/embeddings", json={"model": "x", "input": "a"})).text)
    assert [text for text in texts if address in text or "127.0.0.1" in text or "ipv4" in text] == []
    assert json.loads(texts[0])["error"]["code"] == "not_ready"
