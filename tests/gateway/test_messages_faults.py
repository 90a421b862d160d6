"""Tests of errors in Anthropic's form.

Each test has a gateway and an engine of its own.
"""

import asyncio
import json

import anthropic
import pytest

from tests.support.anthropic_sdk import HELLO, ask, raw_events, sdk_of, streamed
from tests.support.gateway_stack import running
from tests.support.scripted_triton import Step

BODY = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "stream": True}


@pytest.fixture
async def plain(stack):
    async with sdk_of(stack) as stack.sdk:
        yield stack


async def test_the_engine_fails_or_is_gone(plain):
    plain.steps(Step(error="the engine broke", final=True))
    for streaming in (False, True):
        with pytest.raises(anthropic.InternalServerError) as failed:
            await ask(plain, stream=streaming)
        assert (failed.value.status_code, failed.value.type) == (500, "api_error")
        assert "the engine broke" not in failed.value.api_message
    await plain.triton.stop()
    with pytest.raises(anthropic.APIStatusError) as refused:
        await ask(plain)
    assert (refused.value.status_code, refused.value.type) == (503, "api_error")


async def test_the_engine_fails_half_way(plain):
    plain.say("Hello", Step(error="broke", final=True))
    events = await raw_events(plain)
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")
    assert events[-1]["request_id"].startswith("req_")
    assert "message_stop" not in [event["type"] for event in events]
    with pytest.raises(anthropic.APIStatusError) as failed:
        await streamed(plain)
    assert failed.value.type == "api_error"


async def test_a_full_queue_is_529(card, tokenizer):
    async with running(card, tokenizer, limits={"queued": 0}) as stack:
        stack.steps(Step(tuple(tokenizer.encode("Hello")[:1])), Step(hang=True))
        async with sdk_of(stack) as stack.sdk, stack.client.stream("POST", "/v1/messages", json=BODY) as busy:
            assert busy.status_code == 200
            for streaming in (False, True):
                with pytest.raises(anthropic.APIStatusError) as refused:
                    await ask(stack, stream=streaming)
                assert (refused.value.status_code, refused.value.type) == (529, "overloaded_error")
                assert float(refused.value.response.headers["retry-after-ms"]) > 0
            assert (await stack.chat()).status_code == 503
        await stack.idle()


async def test_a_silent_stream_pings(card, tokenizer):
    async with running(card, tokenizer, timeouts={"keepalive": "0.05s"}) as stack:
        go = asyncio.Event()

        async def script(tensors):
            await go.wait()
            yield Step(error="the engine broke", final=True)

        stack.triton.script = script
        seen = []
        async with stack.client.stream("POST", "/v1/messages", json=BODY) as answer:
            assert "request-id" in answer.headers
            async for line in answer.aiter_lines():
                seen.append(line)
                if seen.count("event: ping") == 2:
                    go.set()
        assert not any(line.startswith(":") for line in seen)
        assert [line for line in seen if line.startswith("event: ") and line != "event: ping"] == ["event: error"]
        failed = json.loads([line for line in seen if line.startswith("data: ")][-1].removeprefix("data: "))
        assert failed["error"]["type"] == "api_error"


async def test_a_model_without_grammars(card, tokenizer):
    card["capabilities"]["guided"] = []
    async with running(card, tokenizer) as stack, sdk_of(stack) as stack.sdk:
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: target openvino does not support"):
            await ask(stack, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})


async def test_a_key_in_either_header_says_who_asks(card, tokenizer):
    """The engine alternates between callers when it compiles grammars that are new to it."""
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    body = {**BODY, "stream": False, "output_config": form}
    card["capabilities"]["callers"] = True
    async with running(card, tokenizer) as stack:
        stack.say("ok")
        for headers in ({}, {"x-api-key": "a"}, {"x-api-key": "b"}, {"authorization": "Bearer a"}):
            assert (await stack.client.post("/v1/messages", json=body, headers=headers)).status_code == 200
    asked = [request["caller"] for request in stack.triton.requests]
    assert (asked[0], len(set(asked))) == ("127.0.0.1", 4)
    assert all(caller.startswith("127.0.0.1/") for caller in asked[1:])
