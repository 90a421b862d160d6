"""Tools, reasoning and responses on the wire, with an engine that says exactly what the test wants."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.anthropic_sdk import named_events, prompt_of
from tests.support.gateway_stack import running
from tests.support.scripted_triton import Step

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "now"}},
]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
KNOWS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PLAIN
TEMPLATES = {
    "fallback": PLAIN,
    "hermes": KNOWS + "{# <tool_call> #}",
    "harmony": KNOWS.replace("<assistant>", "<|start|>assistant") + "{# <|channel|>final<|message|> #}",
    "text arguments": "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.arguments + '</call>' }}{% endfor %}{% endfor %}",
    "thinking": KNOWS + "{% if enable_thinking is false %}<think></think>{% endif %}{# <tool_call> #}",
    "thinks at once": KNOWS + "<think>\n{# </think> #}",
}
SAYS = {
    "fallback": 'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "hermes": 'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    # without <|end|>, which is the end of text to this tokenizer
    "harmony": "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>commentary<|message|>Well."
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}<|call|>',
}


@pytest.fixture
async def model(card, tokenizer, tokenizer_dir, tmp_path, request):
    """The scripted model with another chat template."""
    directory = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATES[request.param])
    async with running({**card, "tokenizer_dir": str(directory), "max_seq_len": 8192}, tokenizer) as stack:
        yield stack


def for_models(*names):
    return pytest.mark.parametrize("model", names, indirect=True)


@pytest.mark.parametrize(("model", "text"), list(SAYS.items()), indirect=["model"], ids=list(SAYS))
async def test_a_call(model, text):
    model.say(text)
    whole = (await model.chat(tools=TOOLS)).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("Well.", "tool_calls")
    function = whole["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("get_weather", {"city": "Paris"})

    choices = [event["choices"][0] for event in (await model.events(tools=TOOLS))[:-1]]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (deltas[0]["index"], deltas[0]["function"]["name"], deltas[0]["type"]) == (0, "get_weather", "function")
    assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in deltas[1:])
    assert json.loads("".join(delta["function"]["arguments"] for delta in deltas)) == {"city": "Paris"}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Well."
    assert choices[-1]["finish_reason"] == "tool_calls"


@for_models("harmony")
async def test_harmony_without_tools_and_under_a_grammar(model):
    answer = "<|channel|>analysis<|message|>hm, so<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    model.say(answer)
    whole = (await model.chat()).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, so", "Yes.")
    head, thought = (len(model.tokenizer.encode("<|channel|>analysis<|message|>" + text)) for text in ("", "hm, so"))
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought - head
    model.say('{"city": "Paris"}')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    whole = (await model.chat(response_format=form)).json()
    assert whole["choices"][0]["message"]["content"] == '{"city": "Paris"}'
    assert prompt_of(model).endswith("<|start|>assistant<|channel|>final<|message|>")


@for_models("text arguments")
async def test_a_template_that_takes_arguments_as_text(model):
    model.say("ok")
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert (await model.chat(messages=messages)).status_code == 200
    assert '<call>{"a": 1}</call>' in prompt_of(model)


async def test_the_last_message_can_be_gone_on_with(stack):
    stack.say("is Paris.")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The capital of France "}]
    await stack.chat(messages=messages, continue_final_message=True)
    assert prompt_of(stack).endswith("<assistant>The capital of France")
    refused = await stack.chat(continue_final_message=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


@for_models("fallback", "hermes")
async def test_the_prompt_has_the_tools(model):
    model.say("ok")
    await model.chat(tools=TOOLS)
    assert '"get_weather"' in prompt_of(model)
    await model.chat(tools=TOOLS, tool_choice="none")
    assert '"get_weather"' not in prompt_of(model)


@for_models("hermes")
async def test_a_cut_call_ends_with_length_and_required_sends_a_grammar(model):
    said = model.say(SAYS["hermes"][:-30], end=False)
    cut = (await model.chat(tools=TOOLS, max_tokens=len(said))).json()["choices"][0]
    assert (cut["finish_reason"], cut["message"]["tool_calls"][0]["function"]["name"]) == ("length", "get_weather")
    model.say('[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {}}]')
    choice = (await model.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now", "get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    sent = model.triton.requests[-1]
    assert sent["guided_decoding_guide_type"] == "json_schema"
    assert json.loads(sent["guided_decoding_guide"])["minItems"] == 1


@for_models("hermes")
async def test_history_goes_through_the_template(model):
    model.say("ok")
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "not json"}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Look:", "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    assert ((await model.chat(messages=messages)).status_code, "<tool>noon" in prompt_of(model)) == (200, True)


@pytest.mark.parametrize("one_token", [False, True])
@for_models("thinking", "thinks at once")
async def test_thinking_tokens_are_counted(model, one_token):
    card, directory = model.triton.card, Path(model.triton.card["tokenizer_dir"])
    if one_token:
        # the markers are one token each, and special
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<think>", "</think>")])
        tokenizer.save(str(directory / "tokenizer.json"))
        model.tokenizer = TextTokenizer(directory)
        card |= {"built": card["built"] + 1, "vocab_size": model.tokenizer.vocab_size}
        while (await model.client.get("/v1/models/tiny")).json()["created"] != card["built"]:
            await asyncio.sleep(0.01)
    think = "" if "<think>\n{#" in (directory / "chat_template.jinja").read_text() else "<think>"
    thought, answer = "Hello world! 你好 🙂 é", "The capital of France is Paris."
    parts = [model.tokenizer.encode(text) for text in (think, thought, "</think>", answer)]
    model.steps(*(Step((token,)) for part in parts for token in part), Step((0,)), Step(final=True))
    whole = (await model.chat()).json()
    assert whole["choices"][0]["message"]["reasoning_content"] == thought
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(parts[1])
    assert whole["usage"]["completion_tokens"] == sum(map(len, parts))
    chunks = await model.events(stream_options={"include_usage": True})
    assert chunks[-2]["usage"] == whole["usage"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-2]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
    assert "".join(delta.get("content") or "" for delta in deltas) == answer
    assert (await respond(model)).json()["usage"]["output_tokens_details"]["reasoning_tokens"] == len(parts[1])
    events = await response_events(model, input="hi")
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == len(parts[1])
    # cut off in the middle of the thinking, all but the marker is thinking
    model.steps(*(Step((token,)) for part in parts[:2] for token in part), Step(final=True))
    cut = (await model.chat(max_tokens=len(parts[0]) + len(parts[1]))).json()
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(parts[1])


@for_models("thinking")
async def test_effort_reaches_the_template_and_is_refused_without_a_switch(model, stack):
    model.say("Yes.")
    for effort in ("none", "high"):
        await model.chat(reasoning_effort=effort)
        assert prompt_of(model).endswith("<think></think>") == (effort == "none")
    answer = await stack.chat(reasoning_effort="high")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


# -- responses -------------------------------------------------------------------------------------------------------


async def respond(stack, **fields):
    return await stack.client.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})


async def response_events(stack, **fields):
    data = await named_events(stack, "/v1/responses", fields)
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    return data


@for_models("thinking")
async def test_all_kinds_of_items_in_one_response(model):
    model.say("<think>hm</think>Well." + SAYS["hermes"].removeprefix("Well.") + " Done.")
    tools = [{"type": "function", "name": "get_weather", "parameters": {}}]
    events = await response_events(model, input="hi", tools=tools)
    done = events[-1]
    assert done["type"] == "response.completed"
    output = done["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message"]
    assert all(item["status"] == "completed" for item in output)
    assert json.loads(output[2]["arguments"]) == {"city": "Paris"}
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (added, finished) == ([0, 1, 2, 3], output)
    whole = (await respond(model, tools=tools)).json()
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in output]


@for_models("hermes")
async def test_functions_of_a_namespace_keep_their_name(model):
    """The model knows `clock__now`, the client `now` of the namespace `clock`, in streams and in later turns too."""
    model.say('<tool_call>{"name": "clock__now", "arguments": {}}</tool_call>')
    function = {"type": "function", "name": "now", "parameters": {}}
    clock = {"type": "namespace", "name": "clock", "tools": [function, {"type": "image_generation"}]}
    tools = [function, clock, {"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    said = "The tool '{}' was not offered to the model, because the gateway runs no tools itself."
    answer = await respond(model, tools=tools)
    warned = " ".join(said.format(kind) for kind in ("image_generation", "web_search", "custom"))
    assert answer.headers["x-llmops-warnings"] == warned
    (call,) = answer.json()["output"]
    assert (call["namespace"], call["name"], answer.json()["tools"][1]["name"]) == ("clock", "now", "clock")
    assert [text in prompt_of(model) for text in ('"clock__now"', '"now"', "web_search")] == [True, True, False]
    events = await response_events(model, input="hi", tools=tools)
    items = {event["type"]: event["item"] for event in events if "item" in event}
    added, done = items["response.output_item.added"], items["response.output_item.done"]
    assert (added["namespace"], added["name"], done["namespace"], done["name"]) == ("clock", "now", "clock", "now")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    choice = {"type": "function", "namespace": "clock", "name": "now"}
    turns = [*answer.json()["output"], result]
    assert (await respond(model, input=turns, tools=tools, tool_choice=choice)).status_code == 200
    assert '"name": "clock__now"' in prompt_of(model)


@for_models("hermes")
async def test_leaving_a_response_cancels_it(model):
    model.say("Hello world! How are you? Hello world!", wait=0.05)
    body = {"model": "tiny", "input": "hi", "stream": True}
    async with model.client.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.aiter_lines()
        _, created = await anext(lines), await anext(lines)
    await model.idle()
    response_id = json.loads(created.removeprefix("data: "))["response"]["id"]
    assert (await model.client.get(f"/v1/responses/{response_id}")).json()["status"] == "cancelled"


@for_models("hermes")
async def test_a_turn_can_refer_to_items(model):
    model.say("Paris.")
    item = {"type": "item_reference", "id": (await respond(model, input="Capital?")).json()["output"][0]["id"]}
    assert (await respond(model, input=[item, {"role": "user", "content": "?"}])).status_code == 200
    assert "<assistant>Paris." in prompt_of(model)
    missing = await respond(model, input=[{**item, "id": "msg_x"}])
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "input")


async def test_what_a_response_cannot_do(stack):
    image = {"type": "input_image", "image_url": "x"}
    for fields, param in [
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools[0].tools[0]"),
        # before the fix, each function's name had a copy of it: 5 MB and 6,000 functions were 30 GB
        ({"tools": [{"type": "namespace", "name": "n" * 129, "tools": []}]}, "tools[0]"),
        ({"input": [{"type": "image", "x": 1}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [image]}]}, "input[0].content[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.allowed_tools"),
    ]:
        answer = await respond(stack, **fields)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param
    # in its own words
    answer = await respond(stack, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "text.format")
    assert ("'text.format" in error["message"], "response_format" in error["message"]) == (True, False)
