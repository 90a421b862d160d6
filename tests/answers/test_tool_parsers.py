"""Tool calls out of text: the forms that the model families really write, whole and cut anywhere."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.generation.parsers.families import PARSERS
from llmops.gateway.generation.parsers.forced_calls import NamedCallProcessor, RequiredCallsProcessor
from llmops.gateway.generation.parsers.output_processor import ToolCallDelta
from llmops.gateway.generation.parsers.tool_parser import new_mistral_call_id
from tests.support.tool_texts import (
    ARGUMENTS,
    FRAGMENTS,
    PROSE,
    TAGGED,
    TOOLS,
    WRITERS,
    calls_of,
    cut,
    parse,
    run,
    shape,
    text_of,
)

PARIS = {"city": "Paris"}
CASES = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "Let me look.",
        [PARIS, PARIS],
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>', "", [PARIS]),
    # slips that models make: no closing brace, one brace too many, no closing tag, arguments as a string or null
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": null}</tool_call>', "", [{}]),
    ("hermes", '<tool_call>{"name": "get_weather"}</tool_call>', "", [{}]),
    ("hermes", '<tool_call>{"thought": "x", "name": "get_weather", "arguments": {}}</tool_call>done', "done", [{}]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>', "", [{"city": "a\nb"}]),
    ("hermes", "use <tool_call> for calls", "use <tool_call> for calls", []),
    ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (
        "llama3",
        'Sure: {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_weather", "parameters": {}}',
        "Sure:",
        [PARIS, {}],
    ),
    ("llama3", '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', "", [PARIS]),
    ("llama3", '{"name": "Paris", "population": 2}', '{"name": "Paris", "population": 2}', []),
    ("llama3", '{"name": "get_weather", "id": 1}', '{"name": "get_weather", "id": 1}', []),
    ("llama3", '{"city": {"name": "get_weather", "id": 3}}', '{"city": {"name": "get_weather", "id": 3}}', []),
    ("llama3", "[1, 2] { x }", "[1, 2] { x }", []),
    ("llama3", "<|python_tag|>print(1)", "print(1)", []),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ("mistral", '[TOOL_CALLS][{"name":"get_weather","arguments":{"city":"Paris"},"id":"abcdefghi"}]', "", [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_weather", "arguments": {}}]',
        "",
        [PARIS, {}],
    ),
    ("mistral", 'Looking.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "Looking.", [PARIS]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_weather[ARGS]{}', "", [PARIS, {}]),
    ("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
    ("pythonic", '[get_weather(city="Paris")]', "", [PARIS]),
    ("pythonic", "[get_weather(city='Paris'), get_weather()]", "", [PARIS, {}]),
    ("pythonic", '<|python_start|>[get_weather(city="Paris")]<|python_end|>', "", [PARIS]),
    ("pythonic", 'I will. [get_weather(city="Paris")]', "I will.", [PARIS]),
    (
        "pythonic",
        r"""[get_weather(a='it\'s "q" \u00e9\n', b=[1, (2, None)], c={'x': True, "y": -1.5}, d=false, e='''t'q''')]""",
        "",
        [{"a": 'it\'s "q" é\n', "b": [1, [2, None]], "c": {"x": True, "y": -1.5}, "d": False, "e": "t'q"}],
    ),
    ("pythonic", "[get_weather(city=Paris + 1, n=2)]", "", [{"city": "Paris + 1", "n": 2}]),
    ("pythonic", "[unknown(x=1)] and [1, 2]", "[unknown(x=1)] and [1, 2]", []),
    ("pythonic", "see [get_weather] there", "see [get_weather] there", []),
    (
        "qwen_coder",
        "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call>",
        "Let me look.",
        [PARIS],
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n\n b</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
        "",
        [{"city": "a\n\n b", "n": 3}, {}],
    ),
    # slips: no <tool_call>, no closing tags, no line breaks
    (
        "qwen_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "",
        [PARIS],
    ),
    ("qwen_coder", "<tool_call><function=get_weather><parameter=city>Paris</function></tool_call>ok", "ok", [PARIS]),
    (
        "qwen_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=n>\n1\n</function>",
        "",
        [{"city": "Paris", "n": 1}],
    ),
    ("qwen_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>", "", [PARIS]),
    ("qwen_coder", "a <function=f> and <tool_call> in text", "a <function=f> and <tool_call> in text", []),
    ("qwen_coder", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (
        "glm",
        "Well.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "Well.",
        [PARIS],
    ),
    (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value> a\nb </arg_value><arg_key>n</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>get_weather</tool_call>",
        "",
        [{"city": " a\nb ", "n": 3}, {}],
    ),
    ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</tool_call>", "", [PARIS]),
    ("glm", "use <tool_call> for calls", "use <tool_call> for calls", []),
    ("glm", "<tool_call>get_weather</tool", "<tool_call>get_weather</tool", []),
    (
        "deepseek",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [PARIS, {}],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, {}],
    ),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜> ok',
        "ok",
        [PARIS],
    ),
    ("deepseek", "<｜tool▁calls▁begin｜> what?", "<｜tool▁calls▁begin｜> what?", []),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [PARIS, {}],
    ),
]


@pytest.mark.parametrize("step", [None, 1, 2, 3, 7])
@pytest.mark.parametrize(("family", "text", "prose", "calls"), CASES)
def test_known_forms(family, text, prose, calls, step):
    assert parse(family, text, step) == (prose, [("get_weather", arguments) for arguments in calls])


@pytest.mark.parametrize("family", PARSERS)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.data())
def test_any_text_cut_anywhere_gives_the_same_events(family, text, data):
    whole = run(PARSERS[family](TOOLS), [text])
    assert shape(run(PARSERS[family](TOOLS), list(text))) == shape(whole)
    assert shape(run(PARSERS[family](TOOLS), cut(data, text))) == shape(whole)


@pytest.mark.parametrize("family", PARSERS)
@given(st.text(st.characters(exclude_characters="{[<", codec="utf-8")))
def test_text_without_markup_is_unchanged(family, text):
    assert text_of(run(PARSERS[family](TOOLS), list(text))) == text


@pytest.mark.parametrize("family", [family for family in PARSERS if family not in TAGGED])
@given(PROSE, st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3), st.data())
def test_what_a_model_wrote_comes_back(family, prose, calls, data):
    text = prose + WRITERS[family](calls)
    events = run(PARSERS[family](TOOLS), cut(data, text))
    assert text_of(events) == prose
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == calls


@given(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3), st.data())
def test_forced_list(calls, data):
    text = json.dumps([{"name": n, "arguments": a} for n, a in calls], indent=data.draw(st.sampled_from([None, 2])))
    events = run(RequiredCallsProcessor(), cut(data, text))
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == calls
    assert text_of(events) == ""


@given(ARGUMENTS, st.data())
def test_forced_name(arguments, data):
    events = run(NamedCallProcessor("add"), cut(data, json.dumps(arguments) + " \n"))
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == [("add", arguments)]


@pytest.mark.parametrize("family", PARSERS)
def test_arguments_stream_while_they_are_written(family):
    parser, text = PARSERS[family](TOOLS), WRITERS[family]([("add", {"text": "x" * 1000})])
    sent = 0
    for done, char in enumerate(text, start=1):
        sent += sum(len(e.arguments) for e in parser.feed(char) if isinstance(e, ToolCallDelta))
        if sent:
            assert done - sent < 150  # never further behind than the markup


@pytest.mark.parametrize("family", PARSERS)
def test_cut_off_by_the_token_limit(family):
    text = WRITERS[family]([("add", {"text": "abc"})])
    events = run(PARSERS[family](TOOLS), [text[: text.index("abc") + 3]])
    assert [(n, a.replace(" ", "")) for n, a in calls_of(events)] == [("add", '{"text":"abc')]


def test_mistral_ids():
    given_id = run(PARSERS["mistral"](), ["[TOOL_CALLS]add[CALL_ID]aB3456789[ARGS]{}"])[0]
    own = run(PARSERS["mistral"](), ["[TOOL_CALLS]add[ARGS]{}"])[0]
    assert given_id.id == "aB3456789"
    assert re.fullmatch("[a-zA-Z0-9]{9}", own.id)
    assert new_mistral_call_id() != new_mistral_call_id()


@pytest.mark.parametrize("family", PARSERS)
def test_a_replay_gives_calls_the_same_ids(family):
    """Another gateway that continues an answer, or shows it to a reader, parses the same text again."""

    def ids(source: str) -> list[str]:
        parser = PARSERS[family](TOOLS)
        parser.name_calls(source)
        text = WRITERS[family]([("add", {"text": "a"}), ("add", {"text": "b"})])
        return [event.id for event in run(parser, [text]) if isinstance(event, ToolCallDelta) and event.id]

    first = ids("chatcmpl-1/0")
    assert first == ids("chatcmpl-1/0")
    assert len({*first, *ids("chatcmpl-2/0")}) == 2 * len(first)


@pytest.mark.parametrize("family", PARSERS)
def test_nothing_is_kept_to_be_parsed_again(family):
    """The rest that waits for more text stays short, however long the call gets."""
    text, parser = (
        WRITERS[family]([("add", {"text": "word " * 2000, "list": list(range(500))})]),
        PARSERS[family](TOOLS),
    )
    for i in range(0, len(text), 5):
        parser.feed(text[i : i + 5])
        assert len(parser._buffer) - parser._pos < 200
