"""Anthropic's SDK at a gateway of the tests."""

import json

import anthropic

HELLO = [{"role": "user", "content": "Hello"}]


def sdk_of(stack):
    # without certificates, which take longer to load than a test
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=str(stack.client.base_url), api_key="k", max_retries=0, http_client=http)


def ask(stack, **fields):
    return stack.sdk.messages.create(**{"model": "tiny", "max_tokens": 200, "messages": HELLO, **fields})


async def streamed(stack, **fields):
    """The message that the SDK puts together from the events."""
    given = {"model": "tiny", "max_tokens": 200, "messages": HELLO, **fields}
    async with stack.sdk.messages.stream(**given) as stream:
        return await stream.get_final_message()


async def raw_events(stack, **fields):
    return await named_events(stack, "/v1/messages", {"max_tokens": 200, "messages": HELLO, **fields})


async def named_events(stack, path, fields):
    """The data of an answer's events, each of which has its type as its name, too."""
    async with stack.client.stream("POST", path, json={"model": "tiny", "stream": True, **fields}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines() if line]
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [event["type"] for event in data]
    return data


def prompt_of(stack):
    return stack.tokenizer.decode(stack.triton.requests[-1]["input_ids"])


def told(message):
    """All of a message but what differs with each call, as plain values."""
    shown = message.to_dict()
    assert shown.pop("id").startswith("msg_")
    for block in shown["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id")
    return shown
