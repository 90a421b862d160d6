"""Responses that are fetched, followed, cancelled and sent again, on the wire."""

import asyncio
import json

from openai.types.responses import ResponseItemList
from pydantic import TypeAdapter

from llmops.gateway.api import responses
from llmops.gateway.conversations.background_response import BackgroundFormat
from tests.support.gateway_stack import running
from tests.support.scripted_triton import Step
from tests.support.waiting import GENEROUS

PATH = "/v1/responses"


async def create(stack, **fields):
    return await stack.client.post(PATH, json={"model": "tiny", "input": "hi", **fields})


async def events_of(stream, stop_after=None):
    """The events of a stream, as they are read; leaves it after `stop_after` of them."""
    found = []
    async with stream as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == stop_after:
                    break
    return found


def created(stack, stop_after=None, **fields):
    body = {"model": "tiny", "input": "hi", "stream": True, **fields}
    return events_of(stack.client.stream("POST", PATH, json=body), stop_after)


def streamed(stack, response_id, **query):
    return events_of(stack.client.stream("GET", f"{PATH}/{response_id}", params={"stream": "true", **query}))


async def test_a_stream_is_sent_again(stack):
    stack.say("Hello world! How are you?")
    sent = await created(stack)
    name = sent[0]["response"]["id"]
    assert (await streamed(stack, name), await streamed(stack, name, starting_after=5)) == (sent, sent[6:])


async def test_tools_that_no_prompt_can_have_are_refused_although_they_are_not_used(stack):
    """Each of three events repeats them: 15 MB held the event loop for 234 ms."""
    tool = {"type": "function", "name": "look", "parameters": {}}
    stack.say("Hello")
    for description, status in (("x" * 4_000_000, 200), ("\N{GRINNING FACE}" * 1_100_000, 400)):
        answer = await create(stack, tools=[{**tool, "description": description}], tool_choice="none")
        assert answer.status_code == status, answer.text[:300]
    assert "bytes; send at most 4,194,304." in answer.json()["error"]["message"]


async def test_the_input_is_listed_as_openai_lists_it(stack):
    """openai-python 3.52: each item is one of ResponseItem, and `input_items.list` pages by limit, after and order."""
    given = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "12"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    ]
    stack.say("Hello world!")
    name = (await create(stack, input=given)).json()["id"]
    whole = (await stack.client.get(f"{PATH}/{name}/input_items", params={"order": "asc"})).json()
    TypeAdapter(ResponseItemList).validate_python(whole)
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert [item["type"] for item in whole["data"]] == [item.get("type", "message") for item in given]
    pages = [(await stack.client.get(f"{PATH}/{name}/input_items", params={"limit": 4})).json()]
    query = {"limit": 4, "after": pages[0]["last_id"]}
    pages.append((await stack.client.get(f"{PATH}/{name}/input_items", params=query)).json())
    assert [page["has_more"] for page in pages] == [True, False]
    assert [item for page in pages for item in page["data"]] == whole["data"][::-1]
    for param, value in [("order", "newest"), *(("limit", wrong) for wrong in ("many", "0", "-1", "101"))]:
        refused = await stack.client.get(f"{PATH}/{name}/input_items", params={param: value})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, param, "invalid_value")


async def test_a_response_that_was_not_streamed_can_be(stack):
    stack.say("Hello world!")
    whole = (await create(stack)).json()
    events = await streamed(stack, whole["id"])
    assert (events[-1]["response"], await streamed(stack, whole["id"], starting_after=len(events) + 9)) == (whole, [])
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "Hello world!"


async def test_a_background_response_streams_and_goes_on_without_its_reader(stack):
    stack.say("Hello world! How are you? Hello world! How are you?", wait=0.02)
    first = await created(stack, stop_after=4, background=True)
    name = first[0]["response"]["id"]
    assert first[0]["response"]["background"]
    rest, again = await asyncio.gather(
        streamed(stack, name, starting_after=first[-1]["sequence_number"]), streamed(stack, name)
    )
    assert ([event["sequence_number"] for event in rest], first + rest) == (list(range(4, 4 + len(rest))), again)
    assert (rest[-1]["type"], await streamed(stack, name)) == ("response.completed", again)
    assert (await stack.client.get(f"{PATH}/{name}")).json() == again[-1]["response"]


async def test_what_is_generated_can_be_read_meanwhile(stack):
    stack.say("Hello world! How are you? Hello world! How are you?", Step(hang=True))
    running = (await create(stack, background=True)).json()
    assert running["status"] == "in_progress"

    while not (now := (await stack.client.get(f"{PATH}/{running['id']}")).json())["output"]:
        await asyncio.sleep(0.01)
    assert (now["status"], now["usage"]) == ("in_progress", None)
    assert "Hello world! How".startswith(now["output"][0]["content"][0]["text"][:16])
    early = await create(stack, previous_response_id=running["id"])
    assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
    assert (await stack.client.delete(f"{PATH}/{running['id']}")).json()["deleted"]
    assert (await stack.client.get(f"{PATH}/{running['id']}")).status_code == 404
    await stack.idle()


async def test_reads_of_a_running_response_take_turns_and_copy_no_tools(stack, monkeypatch):
    """Before the fix, each read of one with 180,000 values in its tools held the gateway for 0.05 s."""
    turns, render = [], responses.render_in_turn

    async def noted(share, work):
        turns.append(share)
        return await render(share, work)

    monkeypatch.setattr(responses, "render_in_turn", noted)
    stack.say("Hello", Step(hang=True))
    sent = await create(stack, background=True, tools=[{"type": "other", "values": [1]}])
    read = await stack.client.get(f"{PATH}/{sent.json()['id']}")
    assert (read.json()["tools"], len(turns)) == (sent.json()["tools"], 1)
    await stack.client.delete(f"{PATH}/{sent.json()['id']}")
    form = BackgroundFormat(response=sent.json(), items=[])
    assert form.builder().response["tools"] is form.response["tools"]


async def test_cancel_ends_every_reader(stack):
    stack.say("Hello world! How are you? " * 9, Step(hang=True))
    running = (await create(stack, background=True)).json()
    reader = asyncio.create_task(streamed(stack, running["id"]))
    await asyncio.sleep(0.3)
    stopped = (await stack.client.post(f"{PATH}/{running['id']}/cancel")).json()
    assert stopped["status"] == "cancelled"
    assert await streamed(stack, running["id"]) == await asyncio.wait_for(reader, GENEROUS)
    assert (await stack.client.get(f"{PATH}/{running['id']}")).json() == stopped
    again = await stack.client.post(f"{PATH}/{running['id']}/cancel")
    assert (again.status_code, again.headers["x-should-retry"]) == (400, "false")
    await stack.idle()


async def test_an_engine_that_refuses_fails_a_background_response(stack):
    stack.steps(Step(error="embedding_bias: not supported by target openvino", final=True))
    running = (await create(stack, background=True)).json()

    while (failed := (await stack.client.get(f"{PATH}/{running['id']}")).json())["status"] == "in_progress":
        await asyncio.sleep(0.01)
    assert (failed["status"], "logit_bias" in failed["error"]["message"]) == ("failed", True)
    assert [e["type"] for e in await streamed(stack, running["id"])][-1] == "response.failed"


async def test_a_query_that_says_nothing(stack):
    stack.say("Hello")
    name = (await create(stack)).json()["id"]
    for query, param in [
        ("starting_after=3", "starting_after"),
        *((f"stream=true&starting_after={wrong}", "starting_after") for wrong in ("x", "-1")),
        ("stream=yes", "stream"),
    ]:
        answer = await stack.client.get(f"{PATH}/{name}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_gateway_leaves_nothing_running(card, tokenizer):
    async with running(card, tokenizer) as stack:
        stack.say("Hello world! How are you? " * 9, wait=0.1)
        await create(stack, background=True)
        triton = stack.triton
    assert triton.active == 0
