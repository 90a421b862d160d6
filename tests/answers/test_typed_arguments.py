"""Calls whose arguments are bare text, typed by the schema, and gpt-oss' messages."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmops.gateway.generation.parsers import argument_types
from llmops.gateway.generation.parsers.families import PARSERS
from llmops.gateway.generation.parsers.harmony import HarmonyParser
from llmops.gateway.generation.parsers.output_processor import ReasoningDelta
from tests.support.tool_texts import ARGUMENTS, FRAGMENTS, PROSE, TAGGED, WRITERS, cut, read, run, shape, text_of

PARIS = {"city": "Paris"}
KINDS = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


def schema_of(arguments):
    return {"type": "object", "properties": {name: {"type": KINDS[type(value)]} for name, value in arguments.items()}}


NAMED = st.tuples(st.sampled_from(["one", "two", "three"]), ARGUMENTS)
CALLS = st.lists(NAMED, min_size=1, unique_by=lambda call: call[0])


@pytest.mark.parametrize("family", TAGGED)
@given(PROSE, CALLS, st.data())
def test_bare_text_is_typed_by_the_schema(family, prose, calls, data):
    written = WRITERS[family](calls)
    assume("<" not in "".join(json.dumps(a, ensure_ascii=False) for _, a in calls))
    parser = PARSERS[family]({name: schema_of(arguments) for name, arguments in calls})
    assert read(parser, cut(data, prose + written)) == (prose, calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5), ({"type": "number"}, "5", 5), ({"type": "number"}, "1e-3", 0.001),
        ({"type": "boolean"}, "True", True), ({"type": "boolean"}, "false", False),
        ({"type": "integer"}, "five", "five"), ({"type": "integer"}, "null", None),
        ({"type": "number"}, "NaN", "NaN"), ({"type": "number"}, "1e999", "1e999"), ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"), ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"), ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x5", "x5"), ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1), ({"const": None}, "None", None),
        ({"allOf": [{"description": "x"}, {"type": "array"}]}, "['a', 1]", ["a", 1]),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}), ({"$ref": "#/$defs/n"}, "7", 7),
        ({"$ref": "#/$defs/gone"}, "seven", "seven"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", TAGGED)
def test_kinds_of_values(family, schema, text, value):
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"n": {"type": "integer"}}}
    _, calls = read(PARSERS[family]({"f": parameters}), list(WRITERS[family]([("f", {"x": text})])))
    assert calls == [("f", {"x": value})]


def test_only_short_texts_are_read_as_python(monkeypatch):
    """Before the fix, a list of 200,000 numbers that an answer repeats held the gateway for 0.8 s."""
    read, literal_eval = [], argument_types.ast.literal_eval
    monkeypatch.setattr(argument_types.ast, "literal_eval", lambda text: read.append(len(text)) or literal_eval(text))
    assert argument_types.to_argument_json(f"[{'1,' * 10_000}]", None) == json.dumps([1] * 10_000)
    assert argument_types.to_argument_json(f"[{'1, ' * 99_999}1]", None) == json.dumps([1] * 100_000)
    python = f"[{'1,' * 100_000}]"
    assert argument_types.to_argument_json(python, None) == json.dumps(python)
    assert read == [20_002]


@pytest.mark.parametrize("family", TAGGED)
def test_references_that_repeat_a_schema_are_followed_once(family, monkeypatch):
    """Before the fix, an `anyOf` of three references to itself held a gateway up for minutes, and of ten for ever."""
    followed, resolve = [], argument_types.resolve_references

    def counted(node, root):
        followed.append(1)
        assert len(followed) < 1000
        return resolve(node, root)

    monkeypatch.setattr(argument_types, "resolve_references", counted)
    twice = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 10} for at in range(12)}
    definitions = {"own": {"anyOf": [{"$ref": "#/$defs/own"}] * 10}, **twice, "d12": {"type": "integer"}}
    properties = {"x": {"$ref": "#/$defs/own"}, "y": {"$ref": "#/$defs/d0"}}
    parser = PARSERS[family]({"f": {"type": "object", "properties": properties, "$defs": definitions}})
    written = WRITERS[family]([("f", {"x": "five", "y": "5"})] * 20)
    assert read(parser, [written])[1] == [("f", {"x": "five", "y": 5})] * 20


def test_what_no_schema_speaks_of_is_read_as_each_family_means_it():
    for family, value in (("qwen_coder", "5"), ("glm", 5)):
        _, calls = read(PARSERS[family]({"f": {}}), [WRITERS[family]([("f", {"x": "5"})])])
        assert calls == [("f", {"x": value})]


HARMONY = (
    "<|channel|>analysis<|message|>hm, so<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
    "<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    "<|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
)


@given(st.data())
def test_harmony(data):
    parser, pieces = HarmonyParser(), cut(data, HARMONY)
    assert [event.text for event in run(parser, pieces) if isinstance(event, ReasoningDelta)] == ["hm, so"]
    assert read(HarmonyParser(), pieces) == ("Look:Sunny.", [("get_weather", PARIS), ("now", {})])
    assert [HARMONY[int(a) : int(b)] for a, b in parser.thinking] == ["hm, so"]
    assert parser.made_tool_calls


@pytest.mark.parametrize(
    ("text", "shown", "thought"),
    [
        ("Just text.", "Just text.", ""), ("<|channel|>final<|message|>cut o", "cut o", ""),
        ("<|channel|>analysis<|message|>cut o", "", "cut o"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assist", "", "a"),
        ("<|channel|>commentary to=python <|message|>1+1<|call|>", "", "1+1"), ("<|channel|>", "<|channel|>", ""),
        ("<|channel|>final<|message|>a < b <|x", "a < b <|x", ""), ("y" * 2000, "y" * 2000, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 3, 5000])
def test_harmony_that_is_not_whole(text, shown, thought, step):
    events = run(HarmonyParser(), [text[i : i + step] for i in range(0, len(text), step)])
    assert text_of(events) == shown
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == thought


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.data())
def test_any_harmony_cut_anywhere_gives_the_same_events(text, data):
    whole = run(HarmonyParser(), [text])
    assert shape(run(HarmonyParser(), list(text))) == shape(whole)
    assert shape(run(HarmonyParser(), cut(data, text))) == shape(whole)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    "odd", [{"type": [{}]}, {"type": 5}, {"type": True}, {"allOf": 5}, {"oneOf": [{"type": [[]]}]}]
)
def test_a_schema_without_a_usable_type_leaves_values_as_they_are(family, odd):
    """Before the fix, each such request got 500 and wrote a traceback."""
    parser = PARSERS[family]({"one": {"type": "object", "properties": {"city": odd}}})
    assert [name for name, _ in read(parser, [WRITERS[family]([("one", PARIS)])])[1]] == ["one"]
