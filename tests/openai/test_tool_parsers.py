"""Tool calls out of text: the forms that the model families really write, whole and cut anywhere."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.openai.chain import joined
from llmops.gateway.openai.pieces import Text, ToolCall
from llmops.gateway.openai.tools.base import new_mistral_id
from llmops.gateway.openai.tools.families import PARSERS
from llmops.gateway.openai.tools.forced import ForcedCalls, NamedCall

TOOLS = ("get_weather", "add", "now", "ns.tool-x")


def run(stage, pieces):
    events = [event for piece in pieces for event in stage.feed(piece)]
    return joined(events + stage.finish())


def calls_of(events):
    """`[(name, arguments text)]`, checking the numbering on the way."""
    calls = []
    for event in events:
        if isinstance(event, ToolCall):
            if event.name:
                assert event.index == len(calls)
                assert event.id
                calls.append([event.name, ""])
            assert event.index == len(calls) - 1
            calls[-1][1] += event.arguments
    return [tuple(call) for call in calls]


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Text))


def shape(events):
    """Events without the random ids."""
    return [(type(e), *(e._replace(id=None) if isinstance(e, ToolCall) else e)) for e in events]


def parse(family, text, step=None):
    pieces = [text] if step is None else [text[i : i + step] for i in range(0, len(text), step)]
    events = run(PARSERS[family](TOOLS), pieces)
    return text_of(events), [(name, json.loads(arguments)) for name, arguments in calls_of(events)]


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
]


@pytest.mark.parametrize("step", [None, 1, 2, 3, 7])
@pytest.mark.parametrize(("family", "text", "prose", "calls"), CASES)
def test_known_forms(family, text, prose, calls, step):
    assert parse(family, text, step) == (prose, [("get_weather", arguments) for arguments in calls])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>",
    "<|python_end|>", "{", "}", "[", "]", "(", ")", '"', "'", ":", ",", ";", "=", "\\", " ", "\n", "name",
    "get_weather", "arguments", "parameters",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "parameters": {}}',
    "[add(a=1, b='x')]", "now()", '"name": "add"', '"arguments": {', "é🦙", "text", "null", "1", " " * 70, "\t",
    '"id": "x"', "function", "\\u00", "'''",
]  # fmt: skip


def cut(data, text):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


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


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
IDENTIFIERS = st.from_regex(re.compile(r"[a-z_][a-z0-9_]{0,8}", re.ASCII), fullmatch=True)
ARGUMENTS = st.dictionaries(IDENTIFIERS, VALUES, max_size=4)
PROSE = st.sampled_from(["", "Let me see.", "Süß 🦙:"])

WRITERS = {
    "hermes": lambda calls: "".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>\n" for n, a in calls
    ),
    "llama3": lambda calls: "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
    "pythonic": lambda calls: (
        "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"
    ),
}


@pytest.mark.parametrize("family", PARSERS)
@given(PROSE, st.lists(st.tuples(st.sampled_from(TOOLS), ARGUMENTS), min_size=1, max_size=3), st.data())
def test_what_a_model_wrote_comes_back(family, prose, calls, data):
    text = prose + WRITERS[family](calls)
    events = run(PARSERS[family](TOOLS), cut(data, text))
    assert text_of(events) == prose
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == calls


@given(st.lists(st.tuples(st.sampled_from(TOOLS), ARGUMENTS), min_size=1, max_size=3), st.data())
def test_forced_list(calls, data):
    text = json.dumps([{"name": n, "arguments": a} for n, a in calls], indent=data.draw(st.sampled_from([None, 2])))
    events = run(ForcedCalls(), cut(data, text))
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == calls
    assert text_of(events) == ""


@given(ARGUMENTS, st.data())
def test_forced_name(arguments, data):
    events = run(NamedCall("add"), cut(data, json.dumps(arguments) + " \n"))
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == [("add", arguments)]


@pytest.mark.parametrize("family", PARSERS)
def test_arguments_stream_while_they_are_written(family):
    parser, text = PARSERS[family](TOOLS), WRITERS[family]([("add", {"text": "x" * 1000})])
    sent = 0
    for done, char in enumerate(text, start=1):
        sent += sum(len(e.arguments) for e in parser.feed(char) if isinstance(e, ToolCall))
        if sent:
            assert done - sent < 80  # never further behind than the markup


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
    assert new_mistral_id() != new_mistral_id()


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
