"""Grammars of generated JSON Schemas, followed by the real engine library: every whole answer is valid."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("openvino_genai")
pytest.importorskip("jsonschema")

import jsonschema
import openvino_genai as genai
from llmops_engine.guided.openvino import GrammarPipeline, _prompt, _sampling

from llmops.gateway.generation.structured.grammar import choice_grammar, json_schema_grammar

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

END = 2
VOCABULARY = 49152


class Walker:
    """Random walks through a grammar: each token is one that the library allows, all of them alike."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = genai.Tokenizer(str(model))
        self._pipeline = GrammarPipeline(self._tokenizer, VOCABULARY)

    def whole(self, grammar: str, count: int, tokens: int = 60) -> list[str]:
        """The texts of the walks that came to an end; where a grammar has a lost end, all walks run out of tokens."""
        problem = self._pipeline.compile(("ebnf_grammar", grammar))
        assert problem is None, grammar
        return [text for seed in range(count) if (text := self._walk(grammar, seed, tokens)) is not None]

    def _walk(self, grammar: str, seed: int, tokens: int) -> str | None:
        config = _sampling(("ebnf_grammar", grammar), tokens)
        config.stop_token_ids, config.eos_token_id, config.rng_seed = {END}, END, seed
        ids = list(self._pipeline._pipeline.generate([_prompt()], [config])[0].m_generation_ids[0])
        text = str(self._tokenizer.decode(ids))
        # The library's classes of all characters but some also take bytes that are no UTF-8 (overlong forms,
        # beyond U+10FFFF), in about one of 500 walks; a class without them is one that 0.1.25 cannot read.
        return text if ids[-1:] == [END] and "\ufffd" not in text else None


@pytest.fixture(scope="module")
def walker(engine_dir: Path) -> Walker:
    return Walker(engine_dir / "model")


NAMES = st.sampled_from(["a", "b", "ab", "abc", 'q"x', "é", "é5", "日本a", "a\\b", "", " k"])
NUMBERS = st.integers(-9999, 9999) | st.integers(-20, 20) | st.decimals(-99, 99, places=2).map(float)


@st.composite
def bounded(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number"]))
    low, high = sorted((draw(NUMBERS), draw(NUMBERS)))
    schema: dict[str, Any] = {"type": kind}
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = high + 2
    return schema


VALUES = ["red", "reds", "re", "r", 3, 30, None, True, 1.5, 'x"y', "\n", {"a": [1]}, []]
LEAVES = st.one_of(
    bounded(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"k": 0.1}}, {"type": ["integer", "null"]}]),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=6).map(lambda values: {"enum": values}),
    st.sampled_from(["^[A-Z]{2}-[0-9]{1,3}$", "^a.*z$", "^(ab|ac|b)+$", r"\d\s\w", "[^a]{2}"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.tuples(st.integers(0, 2), st.integers(2, 4)).map(
        lambda sizes: {"type": "string", "minLength": sizes[0], "maxLength": sizes[1]}
    ),
    st.sampled_from([{"$ref": "#/$defs/kind"}, {"$ref": "#/$defs/tree"}]),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    rest = draw(st.sampled_from([False, None]) | inner)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": rest}
    return {key: value for key, value in schema.items() if value is not None}


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    schema = {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + draw(st.integers(0, 2))}
    return {**schema, "prefixItems": [draw(inner)]} if draw(st.booleans()) and schema["maxItems"] else schema


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
        | inner.map(lambda part: {"allOf": [part, {"description": "d"}]})
    ),
    max_leaves=5,
)
DEFINITIONS = {
    "kind": {"enum": ["a", "b", "ab"]},
    "tree": {
        "type": "object",
        "properties": {
            "v": {"type": "integer", "minimum": 33, "maximum": 142},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        },
        "required": ["v"],
        "additionalProperties": False,
    },
}


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_any_schema_of_the_family(walker: Walker, schema: dict[str, Any]) -> None:
    schema = {"$defs": DEFINITIONS, **schema}
    valid = jsonschema.Draft202012Validator(schema)
    for text in walker.whole(json_schema_grammar(json.dumps(schema), True), 6, 40):
        valid.validate(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        # each is one that the library's own conversion gets wrong
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": -0.5, "maximum": 0.25},
        {"type": "integer", "minimum": 5},
        {"type": "integer", "minimum": -5},
        {"type": "integer", "maximum": -5},
        {"type": "integer", "minimum": 26, "maximum": 177},
        {"enum": ["xxbb", "axa", "aaaa", "aaa", "xaaa", "xa"]},
        {"type": "string", "pattern": "^.*$", "maxLength": 3},
        {"type": "object", "properties": {'q"x': {"type": "null"}}, "required": ['q"x']},
        {"type": "object", "required": ["a"]},
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    ],
)
def test_what_the_library_gets_wrong_by_itself(walker: Walker, schema: dict[str, Any]) -> None:
    texts = walker.whole(json_schema_grammar(json.dumps(schema), True), 40, 30)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("text", ["é5", "日本a", "\x7fb", "\n5", "a\rF", "😀e", "ÿÿ0", '"é\\5', "\u2028d"])
def test_a_text_is_written_as_it_is(walker: Walker, text: str) -> None:
    assert walker.whole(choice_grammar((text,)), 2, 20) == [text, text]
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    found = walker.whole(json_schema_grammar(json.dumps(schema), True), 4, 90)
    assert found
    assert all(json.loads(one) == {text: text} for one in found)
