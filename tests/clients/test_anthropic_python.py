"""anthropic-python, sync and async, against the real stack."""

import anthropic
import httpx
import pytest

from tests.clients.test_openai_python import PARAMETERS, QUESTION

SYSTEM = "You answer in one short sentence."
GREEDY = {"temperature": 0}
WEATHER = {"name": "get_weather", "description": "The weather in a city.", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def client(base_url):
    http = anthropic.DefaultHttpxClient(verify=False)
    with anthropic.Anthropic(base_url=root(base_url), api_key="k", max_retries=0, http_client=http) as client:
        yield client


def root(base_url):
    """The SDK adds /v1 itself."""
    return base_url.removesuffix("/v1")


def asked(**options):
    return {"model": "smollm2", "messages": QUESTION, "max_tokens": 40, "extra_body": GREEDY, **options}


def chat(base_url, **options):
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 40, **GREEDY, **options}
    return httpx.post(f"{base_url}/chat/completions", json=body, timeout=60).json()


def test_a_message_is_what_chat_says(client, base_url):
    message = client.messages.create(**asked(system=SYSTEM))
    same = chat(base_url, messages=[{"role": "system", "content": SYSTEM}, *QUESTION])
    assert "Paris" in message.content[0].text
    assert message.content[0].text == same["choices"][0]["message"]["content"]
    assert message.usage.input_tokens == same["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == same["usage"]["completion_tokens"]
    assert message.stop_reason == "end_turn"


def test_a_stream_says_the_same(client):
    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert {**final.to_dict(), "id": None} == {**whole.to_dict(), "id": None}
    kinds = [event.type for event in client.messages.create(**asked(stream=True))]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_forced_call_and_its_result(client):
    tools = {"tools": [WEATHER], "max_tokens": 60}
    forced = asked(**tools, tool_choice={"type": "tool", "name": "get_weather"})
    message = client.messages.create(**forced)
    (call,) = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert set(call.input) == {"city", "unit"}
    with client.messages.stream(**forced) as stream:
        assert stream.get_final_message().content[0].input == call.input
    any_of = client.messages.create(**asked(**tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}))
    assert [block.name for block in any_of.content] == ["get_weather"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18 degrees"}]}
    history = [*QUESTION, message.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(**asked(**tools, messages=history)).stop_reason in ("end_turn", "max_tokens")
