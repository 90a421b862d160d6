"""Anthropic's API through its own SDK, with an engine that says exactly what a test wants."""

import json
import re
import shutil
from contextlib import AsyncExitStack, asynccontextmanager

import anthropic
import pytest
import pytest_asyncio

from tests.support.anthropic_sdk import HELLO, ask, prompt_of, raw_events, sdk_of, streamed, told
from tests.support.gateway_stack import card_of, running
from tests.support.scripted_triton import Step

WEATHER = {
    "name": "get_weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
CALLED = {"type": "tool_use", "id": "t", "name": "f"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2.5, null]}}\n</tool_call>'
ARGUMENTS = {"city": "Paris", "days": [1, 2.5, None]}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}{# <tool_call> </think> #}"
)
DEGREES = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"


def text_block(text, **fields):
    return {"type": "text", "text": text, **fields}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def served(tokenizer_dir, tokenizer, directory, template):
    """A model with that template, and the SDK's client as `stack.sdk`."""
    shutil.copytree(tokenizer_dir, directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    card = card_of(directory, tokenizer) | ({} if template is None else {"max_seq_len": 2048})
    async with running(card, tokenizer) as stack, sdk_of(stack) as stack.sdk:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(tokenizer_dir, tokenizer, tmp_path_factory):
    async with AsyncExitStack() as running_ones:
        yield [
            await running_ones.enter_async_context(
                served(tokenizer_dir, tokenizer, tmp_path_factory.mktemp("model") / "t", template)
            )
            for template in (TEMPLATE, None, DEGREES)
        ]


@pytest.fixture
def agent(models):
    """A model that thinks and calls."""
    models[0].triton.requests.clear()
    return models[0]


@pytest.fixture
def plain(models):
    """A model that only talks, with a context of 256 tokens."""
    models[1].triton.requests.clear()
    return models[1]


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_a_text_with_its_counts(plain):
    text = 'The capital of "France":\n\\é 🙂 Paris.'
    said = plain.say(text)
    message = await ask(plain)
    prompt = plain.triton.requests[-1]["input_ids"]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in message.content] == [("text", text)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), len(said))
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (0, 0)
    assert message._request_id.startswith("req_")
    assert told(await streamed(plain)) == told(message)


async def test_the_order_of_events(agent):
    agent.say("<think>hm</think>Well." + CALL)
    events = await raw_events(agent, tools=[WEATHER])
    kinds = [event["type"] for event in events]
    starts = [event for event in events if event["type"] == "content_block_start"]
    blocks = [(start["index"], start["content_block"]["type"]) for start in starts]
    assert blocks == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    assert (kinds[:3], kinds.count("ping")) == (["message_start", "content_block_start", "ping"], 1)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    at = -1
    for event in events:
        at += event["type"] == "content_block_start"
        assert event.get("index", at) == at
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    prompt = agent.triton.requests[-1]["input_ids"]
    assert begun["usage"]["input_tokens"] == events[-2]["usage"]["input_tokens"] == len(prompt)


async def test_thinking_text_and_calls_are_blocks_in_their_order(agent):
    agent.say("<think>Let me see.</think>Well.\n" + CALL + "\n" + CALL + " Done.")
    message = await ask(agent, tools=[WEATHER], max_tokens=400)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    thinking, text, first, second, after = message.content
    assert (thinking.thinking, text.text, after.text) == ("Let me see.", "Well.", "Done.")
    assert thinking.signature
    assert (first.name, first.input, second.input) == ("get_weather", ARGUMENTS, ARGUMENTS)
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    assert told(await streamed(agent, tools=[WEATHER], max_tokens=400)) == told(message)


async def test_an_answer_that_is_cut_off_is_the_same_streamed(agent):
    for cut in (12, 45, 80):
        said = agent.tokenizer.encode("<think>hm</think>Well.\n" + CALL)[:cut]
        agent.steps(*(Step((token,)) for token in said), Step(final=True))
        message = await ask(agent, tools=[WEATHER], max_tokens=len(said))
        assert message.stop_reason == "max_tokens"
        assert told(await streamed(agent, tools=[WEATHER], max_tokens=len(said))) == told(message)


async def test_tool_choices(agent):
    agent.say('[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]')
    message = await ask(agent, tools=[WEATHER, NOW], tool_choice={"type": "any"})
    assert [(block.name, block.input) for block in message.content] == [("now", {}), ("get_weather", {"city": "Paris"})]
    assert message.stop_reason == "tool_use"
    assert "maxItems" not in json.loads(agent.triton.requests[-1]["guided_decoding_guide"])
    await ask(agent, tools=[WEATHER, NOW], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert json.loads(agent.triton.requests[-1]["guided_decoding_guide"])["maxItems"] == 1
    agent.say('{"city": "Paris"}')
    one = {"type": "tool", "name": "get_weather"}
    message = await ask(agent, tools=[WEATHER, NOW], tool_choice=one)
    assert [(block.name, block.input) for block in message.content] == [("get_weather", {"city": "Paris"})]
    assert message.stop_reason == "tool_use"
    assert told(await streamed(agent, tools=[WEATHER, NOW], tool_choice=one)) == told(message)
    agent.say(CALL)
    message = await ask(agent, tools=[WEATHER], tool_choice={"type": "none"})
    assert [(block.type, block.text) for block in message.content] == [("text", CALL)]
    assert "get_weather" not in prompt_of(agent)
    agent.say(CALL + CALL)
    message = await ask(agent, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content] == ["tool_use"]


async def test_a_loop_of_tools(agent):
    """The SDK's own runner: it calls our answers' tools and sends the results back."""
    asked = []

    @anthropic.beta_async_tool
    async def get_weather(city: str, days: list) -> str:
        """The weather.

        Args:
            city: where
            days: when
        """
        asked.append((city, days))
        agent.say("It rains.")
        return "rain"

    agent.say("<think>hm</think>Well.\n" + CALL)
    given = {"model": "tiny", "max_tokens": 200, "messages": HELLO, "system": [text_block("Be brief.")]}
    last = await agent.sdk.beta.messages.tool_runner(tools=[get_weather], **given).until_done()
    assert (asked, [block.text for block in last.content]) == ([("Paris", [1, 2.5, None])], ["It rains."])
    assert prompt_of(agent).endswith(
        "<system>Be brief.\n<user>Hello\n<assistant>[hm]Well."
        f"(get_weather {json.dumps(ARGUMENTS)})\n<tool>rain\n<assistant>"
    )


async def test_a_stop_sequence_is_named(plain):
    plain.say("The capital of France is Paris.")
    message = await ask(plain, stop_sequences=["London", " France"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " France")
    assert message.content[0].text == "The capital of"
    assert told(await streamed(plain, stop_sequences=["London", " France"])) == told(message)


async def test_an_answer_without_anything(plain):
    plain.say("")
    message = await ask(plain)
    assert (message.content, message.stop_reason) == ([], "end_turn")
    assert [event["type"] for event in await raw_events(plain)] == ["message_start", "message_delta", "message_stop"]


async def test_more_than_the_context_has_room_for_is_cut(plain):
    """Agents ask for 32,000 tokens of every model."""
    said = plain.tokenizer.encode("Hello") * 256
    plain.steps(*(Step((token,)) for token in said), Step(final=True))
    room = 256 - (await plain.sdk.messages.count_tokens(model="tiny", messages=HELLO)).input_tokens
    plain.steps(*(Step((token,)) for token in said[:room]), Step(final=True))
    message = await ask(plain, max_tokens=20_000)
    assert plain.triton.requests[-1]["request_output_len"] == [room]
    assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", room)
    assert told(await streamed(plain, max_tokens=20_000)) == told(message)
    assert (await ask(plain, max_tokens=room)).stop_reason == "max_tokens"


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_a_conversation_becomes_its_prompt(agent):
    agent.say("ok")
    thought = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "y"}]
    first, second = ({"type": "tool_use", "id": name, "name": "now"} for name in ("t1", "t2"))
    told = {"type": "tool_result", "tool_use_id": "t1", "content": "noon"}
    failed = {"type": "tool_result", "tool_use_id": "t2", "content": [text_block("no clock"), text_block("here")]}
    called = [{**first, "input": {}}, {**second, "input": {"é": [1]}}]
    turns = [
        {"role": "user", "content": [text_block("a", cache_control={"type": "ephemeral"})]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [*thought, text_block("c"), *called]},
        {"role": "user", "content": [told, {**failed, "is_error": True}, text_block("d")]},
    ]
    await ask(agent, messages=turns, system=[text_block("s"), text_block("t")])
    assert prompt_of(agent) == (
        '<system>s\nt\n<user>a\nb\n<assistant>[hm]c(now {})(now {"é": [1]})\n'
        "<tool>noon\n<tool>Error: no clock\nhere\n<user>d\n<assistant>"
    )


async def test_the_beginning_of_the_answer_is_gone_on_with(agent):
    agent.say(" is Paris.")
    begun = [*HELLO, {"role": "assistant", "content": "The capital"}]
    assert (await ask(agent, messages=begun)).content[0].text == " is Paris."
    assert prompt_of(agent).endswith("<user>Hello\n<assistant>The capital")
    await ask(agent, messages=[*HELLO, {"role": "assistant", "content": ""}])
    assert prompt_of(agent).endswith("<user>Hello\n<assistant>")


async def test_sampling_reaches_the_engine(plain):
    plain.say("ok")
    extra = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 11}
    await ask(plain, max_tokens=9, extra_body=extra, metadata={"user_id": "u"})
    sent = plain.triton.requests[-1]
    assert (sent["request_output_len"], sent["runtime_top_p"], sent["runtime_top_k"]) == ([9], [0.25], [7])
    assert (sent["temperature"], sent["seed"]) == ([0.5], [11])


async def test_fields_of_chat_completions_work_as_extras(agent):
    agent.say("ok")
    extra = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}, "max_completion_tokens": 3}
    await ask(agent, max_tokens=9, extra_body=extra)
    assert prompt_of(agent).endswith("<think></think>")
    assert agent.triton.requests[-1]["request_output_len"] == [9]
    await ask(agent, thinking={"type": "adaptive"}, extra_body={"reasoning_effort": "none"})
    assert not prompt_of(agent).endswith("<think></think>")


@pytest.mark.parametrize("field", ["user", "stop", "response_format", "max_completion_tokens"])
async def test_errors_name_fields_as_the_client_sent_them(plain, field):
    """Before the fix, a wrong `user` was refused as `metadata.user_id`, which was not in the request."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], field: {"a": {}}}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = await plain.client.post(path, json=body | ({"max_tokens": 9} if path == "/v1/messages" else {}))
        if answer.status_code == 400:
            assert f"'{field}" in answer.json()["error"]["message"]


async def test_structured_output(plain):
    plain.say('{"city": "Paris"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    message = await ask(plain, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message.content[0].text) == {"city": "Paris"}
    assert json.loads(plain.triton.requests[-1]["guided_decoding_guide"])["required"] == ["city"]


async def test_thinking_is_the_templates_switch_or_its_degree(models, agent):
    enabled, off, adaptive = {"type": "enabled"}, {"type": "disabled"}, {"type": "adaptive"}
    for fields, effort in [
        ({"thinking": off}, "none"),
        ({"thinking": {**enabled, "budget_tokens": 2048}}, "low"),
        ({"thinking": {**enabled, "budget_tokens": 10_000}}, "medium"),
        ({"thinking": {**enabled, "budget_tokens": 32_000}}, "high"),
        ({"thinking": adaptive}, "medium"),
        ({"thinking": adaptive, "output_config": {"effort": "max"}}, "high"),
        ({"thinking": off, "output_config": {"effort": "low"}}, "none"),
    ]:
        for one in (agent, models[2]):
            one.say("ok")
            await ask(one, **fields)
        assert prompt_of(agent).endswith("<think></think>") == (effort == "none")
        assert prompt_of(models[2]) == f"{effort}Hello"
    await ask(agent)
    assert not prompt_of(agent).endswith("<think></think>")


async def test_what_changes_nothing_is_said(plain):
    plain.say("ok")
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, "service_tier": "auto"}
    fields |= {"cache_control": {"type": "ephemeral"}, "extra_body": {"what": 1, "seed": 3}}
    raw = await plain.sdk.messages.with_raw_response.create(model="tiny", max_tokens=5, messages=HELLO, **fields)
    assert raw.headers["x-llmops-ignored"] == "thinking, thinking.display, what"


async def test_tools_that_a_server_would_run_are_left_out(agent):
    agent.say("ok")
    tools = [{"type": "web_search_20250305", "name": "web_search"}, NOW]
    raw = await agent.sdk.messages.with_raw_response.create(model="tiny", max_tokens=5, messages=HELLO, tools=tools)
    said = "The tool 'web_search_20250305' was not offered to the model, because the gateway runs no tools itself."
    assert raw.headers["x-llmops-warnings"] == said
    assert "web_search" not in prompt_of(agent)
    count = await agent.sdk.messages.with_raw_response.count_tokens(model="tiny", messages=HELLO, tools=tools)
    assert count.headers["x-llmops-warnings"] == said


async def test_tools_that_are_only_shown_may_have_any_lengths_and_patterns(agent):
    """Claude Code's own have: one takes scripts of up to 524,288 characters."""
    agent.say("ok")
    script = {"type": "string", "maxLength": 524_288, "pattern": r"^(?!export).*\bmeta\b"}
    wide = {"name": "run", "input_schema": {"type": "object", "properties": {"script": script}}}
    await ask(agent, tools=[wide])
    assert "524288" in prompt_of(agent)
    with pytest.raises(anthropic.BadRequestError, match="'maxLength' is 524288, and the limit is 8192"):
        await ask(agent, tools=[wide], tool_choice={"type": "any"})


async def test_what_an_agent_sends_before_and_around(agent):
    """Claude Code sends the same: a HEAD request to the root, the beta flag, and its headers.

    The system prompt is in blocks, and cache markers are everywhere.
    """
    assert (await agent.client.head("/")).status_code == 200
    agent.say("Well.\n" + CALL)
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    asked = agent.sdk.beta.messages.stream(
        model="tiny",
        max_tokens=32_000,
        system=[text_block("You are an agent.", **cached)],
        messages=[{"role": "user", "content": [text_block("hi", **cached)]}],
        tools=[WEATHER],
        metadata={"user_id": "user_1_session_2"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["interleaved-thinking-2025-05-14", "claude-code-20250219"],
        extra_headers={"x-app": "cli", "anthropic-dangerous-direct-browser-access": "true"},
    )
    async with asked as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]


# -- counting ----------------------------------------------------------------------------------------------------------


async def test_tokens_are_counted_as_they_are_used(agent):
    agent.say("[]")
    for asked, fields in enumerate(
        [
            {},
            {"system": "Be brief.", "messages": [*HELLO, {"role": "assistant", "content": "The capital"}]},
            {"tools": [WEATHER, NOW]},
            {"tools": [WEATHER], "tool_choice": {"type": "any"}},
            {"tools": [WEATHER], "tool_choice": {"type": "none"}},
            {"thinking": {"type": "disabled"}},
        ]
    ):
        counted = (await agent.sdk.messages.count_tokens(**{"model": "tiny", "messages": HELLO, **fields})).input_tokens
        assert len(agent.triton.requests) == asked
        assert (await ask(agent, **fields)).usage.input_tokens == counted == len(agent.triton.requests[-1]["input_ids"])


# -- models ------------------------------------------------------------------------------------------------------------


async def test_models(plain):
    listed = [model async for model in plain.sdk.models.list()]
    assert [(model.id, model.type, model.max_input_tokens) for model in listed] == [("tiny", "model", 256)]
    assert (await plain.sdk.models.retrieve("tiny")).created_at.timestamp() == 1790000000
    with pytest.raises(anthropic.NotFoundError):
        await plain.sdk.models.retrieve("huge")
    assert (await plain.client.get("/v1/models")).json()["object"] == "list"


# -- errors ------------------------------------------------------------------------------------------------------------


IMAGE, RESULT = [{"type": "image"}], {"type": "tool_result", "tool_use_id": "t"}


def block(role="user", **fields):
    return {"messages": [{"role": role, "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "Invalid value for 'max_tokens'"),
        ({"messages": []}, "Invalid value for 'messages'"),
        ({"messages": [{"role": "user", "content": []}]}, "'messages[0].content' must not be empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "Invalid value for 'messages[0].role'"),
        ({"messages": [{"role": "user"}]}, "Missing required parameter: 'messages[0].content'"),
        (block(text="x"), "Missing required parameter: 'messages[0].content[0].type'"),
        (block(type="text"), "Missing required parameter: 'messages[0].content[0].text'"),
        (block(type="image", source={}), "'messages[0].content[0]' is of type 'image', which is not supported"),
        (block(**CALLED, input={}), "belongs in a message of the assistant"),
        (block(type="tool_result", content="x"), "Missing required parameter: 'messages[0].content[0].tool_use_id'"),
        (block(**RESULT, content=IMAGE), "'messages[0].content[0].content[0]' is of type 'image'"),
        (block("assistant", **RESULT), "belongs in a message of the user"),
        (block("assistant", **CALLED, input={}), "send their results (tool_result)"),
        (block("assistant", **CALLED), "Missing required parameter: 'messages[0].content[0].input'"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "'messages' must contain a non-empty message"),
        ({"system": IMAGE}, "'system[0]' is of type 'image'"),
        ({"temperature": 3}, "Invalid value for 'temperature'"),
        ({"stop_sequences": [""]}, "must have at most 16 stop strings of 1 to 1024"),
        ({"tools": [{"name": "f"}]}, "Missing required parameter: 'tools[0].input_schema'"),
        ({"tools": [{"input_schema": {}}]}, "Missing required parameter: 'tools[0].name'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "Invalid value for 'tools[0].name'"),
        ({"tools": [NOW, NOW]}, "Two tools have the name 'now'"),
        ({"tools": [{"name": "f", "input_schema": {"type": 5}}]}, "tools[0].input_schema"),
        ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "Missing required parameter: 'tool_choice.name'"),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "names 'x', which is not among the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'any', but there are no tools"),
        ({"tool_choice": "auto"}, "Invalid value for 'tool_choice'"),
        ({"thinking": {"type": "deep"}}, "Invalid value for 'thinking.type'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "Invalid value for 'thinking.budget_tokens'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
        ({"compaction": {"type": "enabled"}}, "compaction is not supported"),
        ({"thread": {"type": "create"}}, "send the whole conversation"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers are not supported"),
        ({"n": 2}, "A message has one answer"),
    ],
)
async def test_wrong_requests(plain, fields, said):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await plain.sdk.messages.create(model="tiny", max_tokens=5, messages=HELLO, extra_body=fields)
    assert refused.value.type == "invalid_request_error"
    assert said in refused.value.api_message
    assert refused.value.request_id == refused.value.body["request_id"]
    assert set(refused.value.body) == {"type", "error", "request_id"}
    assert set(refused.value.body["error"]) <= {"type", "message", "details"}
    assert plain.triton.requests == []


async def test_errors_before_there_is_a_request(plain):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        broken = await plain.client.post(path, content=b'{"model": ')
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "not valid JSON" in broken.json()["error"]["message"]
        assert broken.headers["request-id"] == broken.json()["request_id"]
        large = await plain.client.post(path, content=b" " * (16 * 2**20 + 1))
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        assert (await plain.client.get(path)).json()["error"]["type"] == "invalid_request_error"
    missing = await plain.client.post("/v1/messages/batches", json={})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await ask(plain, model="huge")
    assert unknown.value.type == "not_found_error"
    assert "'huge' does not exist" in unknown.value.api_message
    for openais in (await plain.client.post("/v1/nope", json={}), await plain.chat(temperature=3)):
        assert (set(openais.json()), "request-id" in openais.headers) == ({"error"}, False)


async def test_a_prompt_that_does_not_fit(plain):
    """Claude Code recognises by these words that it has to compact the conversation."""
    told = []
    for text in ("Hello world " * 100, "Hello world " * 10000, "Hello world " * 500_000):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as refused:
            await ask(plain, messages=[{"role": "user", "content": text}])
        told.append(re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*256", refused.value.api_message))
    assert int(told[0][1]) == len(plain.tokenizer.encode("<user>" + "Hello world " * 100 + "\n<assistant>"))
    assert int(told[1][1]) > 256
    assert told[2] is None
