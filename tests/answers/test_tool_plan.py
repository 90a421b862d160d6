"""Tests of the prompt, grammar and parser that a request's tools turn into."""

import json

import jinja2
import pytest
from pydantic import TypeAdapter

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.parsers import tool_messages
from llmops.gateway.generation.parsers.families import detect_family
from llmops.gateway.generation.parsers.output_processor import ContentDelta, ProcessorChain
from llmops.gateway.generation.parsers.tool_messages import messages_for_template, tools_in_system_message
from llmops.gateway.generation.parsers.tool_plan import plan_tools
from llmops.gateway.interfaces import Guide
from llmops.gateway.schemas.chat_request import Tool, ToolChoice
from tests.support import tool_texts

HERMES = "{% if tools %}<tool_call>{% endif %}"
MISTRAL = "{% for tool in tools %}[TOOL_CALLS]{% endfor %}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name, parameters=None):
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def choice(value):
    return TypeAdapter(ToolChoice).validate_python(value)


def named(name):
    return choice({"type": "function", "function": {"name": name}})


def run(plan, text):
    return tool_texts.run(plan.processor() if plan.processor else ProcessorChain(), text)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (HERMES, "hermes"),
        ("{{ tools }} <tool_call>\n<function=name>", "qwen_coder"),
        ("{{ tools }} <tool_call>name<arg_key>", "glm"),
        (MISTRAL, "mistral"),
        ('{{ tools }} {"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        ("{{ tools }} [func_name1(params_name1=params_value1, params_name2=…)] <|python_tag|>", "pythonic"),
        ("{{ tools }} <|python_start|>", "pythonic"),
        ("{{ tools }} <|python_tag|>", "llama3"),
        ("{{ tools }} <｜tool▁call▁begin｜>", "deepseek"),
        ("{{ tools }} nothing known", None),
        ("{{ messages }}", "hermes"),
    ],
)
def test_family_by_template(template, family):
    assert detect_family(template) == family


def test_allowed_tools_narrow_the_grammar_not_the_prompt():
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("f").model_dump()]}}
    plan = plan_tools([tool("f"), tool("g")], choice(allowed), None, HERMES)
    assert len(plan.definitions) == 2
    assert '"const":"f"' in plan.guide.text
    assert '"const":"g"' not in plan.guide.text


def test_tools_together_with_a_json_answer():
    jsonschema = pytest.importorskip("jsonschema")
    plan = plan_tools([tool("f")], "auto", None, HERMES, Guide("json_schema", json.dumps(WEATHER)))
    valid = jsonschema.Draft202012Validator(json.loads(plan.guide.text)).is_valid
    assert valid({"city": "Paris"})
    assert valid([{"name": "f", "arguments": {}}])
    assert not valid({"name": "f", "arguments": {}})
    assert run(plan, '{"city": "Paris"}') == [ContentDelta('{"city": "Paris"}')]
    assert run(plan, ' [{"name": "f", "arguments": {}}]')[0].name == "f"


@pytest.mark.parametrize(
    ("tools", "how", "guide", "param"),
    [
        ([tool("f")], named("g"), None, "tool_choice"),
        ([], "required", None, "tool_choice"),
        ([tool("f"), tool("f")], "auto", None, "tools[1]"),
        ([tool("f", {"type": "wrong"})], "auto", None, "tools[0].function.parameters"),
        ([tool("f")], "auto", Guide("regex", "a"), "response_format"),
    ],
)
def test_refused(tools, how, guide, param):
    with pytest.raises(InvalidRequestError) as refused:
        plan_tools(tools, how, None, HERMES, guide)
    assert refused.value.param == param


CALL = {"id": "call_123", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_123", "content": "one"},
    {"role": "tool", "tool_call_id": "call_123", "content": [{"type": "text", "text": "two"}]},
]


def test_arguments_become_objects():
    assert messages_for_template(HISTORY)[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert HISTORY[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_mistral_ids_agree_between_call_and_result():
    messages = messages_for_template(HISTORY, mistral_ids=True)
    to_id = tool_messages.to_mistral_call_id
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == to_id("call_123")
    assert (len(to_id("call_123")), to_id("abcDEF123")) == (9, "abcDEF123")


def test_a_template_without_tools_gets_them_as_text():
    messages = tools_in_system_message(HISTORY, [{"type": "function", "function": {"name": "f"}}])
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n"
    rendered = jinja2.Template(template).render(messages=messages)
    assert rendered.endswith(f"[user] hi\n[assistant] {call}{call}[user] {results}")
    assert '{"type": "function", "function": {"name": "f"}}' in messages[0]["content"]
    assert messages[0]["role"] == "system"


def test_the_system_message_is_kept():
    messages = tools_in_system_message([{"role": "system", "content": "Be brief."}], [{"name": "f"}])
    assert len(messages) == 1
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call")
