"""Schemas, patterns and grammars that clients send to keep others waiting: what they cost is counted in steps, not in
seconds, so that a slow machine changes nothing."""

import ast
import contextlib
import json
import re
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmops.gateway
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.structured.grammar import NotEnforceableError, grammar_cache, json_schema_grammar
from llmops.gateway.generation.structured.grammar.client_grammar import _TOKEN, find_ebnf_error, isolate_classes
from llmops.gateway.generation.structured.grammar.compile_limits import step_budget
from llmops.gateway.generation.structured.grammar.schema_compiler import SchemaCompiler
from llmops.gateway.generation.structured.request_guide import compile_guide, parse_guide
from llmops.gateway.generation.structured.schema_validation import _find_problem, validate_schema
from llmops.gateway.interfaces import Guide
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.text import text_thread_pool
from llmops.gateway.text.text_thread_pool import INLINE_CHARACTERS, TextThreadPool

# the openings of what a grammar nests
OPENINGS = (
    "[", "[^", '"', '"\\', "{", "(", "'", "#", "a", "a ", "a::=", "\\", "|", "[a", '["', "{1,", "é", "::=",
    "\n", "((a)", '"x"', "]",
)  # fmt: skip

ENDLESS = 10**12
#: A backtracking matcher takes twice the time for each further character of the text.
EVIL, EVIL_TEXT = "^(a+)+$", "a" * 400 + "!"


def steps(make) -> float:
    """Return the steps that `make` spends, also if it rejects the schema."""
    with step_budget(ENDLESS, ENDLESS) as spent:
        with contextlib.suppress(NotEnforceableError):
            make()
        return spent()


def compiled(schema) -> str:
    return SchemaCompiler(json.loads(validate_schema(schema, "p")), True).grammar()


MATCHED = {
    "enum": {"enum": [EVIL_TEXT, "a"], "pattern": EVIL},
    "const": {"const": EVIL_TEXT, "pattern": EVIL},
    "both of allOf": {"allOf": [{"enum": [EVIL_TEXT, "a"]}, {"pattern": EVIL}]},
    "patternProperties": {"type": "object", "properties": {EVIL_TEXT: {}}, "patternProperties": {EVIL: {}}},
    "propertyNames": {"type": "object", "properties": {EVIL_TEXT: {}}, "propertyNames": {"pattern": EVIL}},
}


@pytest.mark.parametrize("schema", MATCHED.values(), ids=MATCHED)
def test_no_pattern_is_matched_with_a_text(schema):
    with pytest.raises(NotEnforceableError, match="cannot be enforced"):
        compiled(schema)
    assert json_schema_grammar(validate_schema(schema, "p"), False)


def levels(count: int, width: int, key: str = "allOf") -> dict:
    parts = {f"d{at}": {key: [{"$ref": f"#/$defs/d{at + 1}"}] * width} for at in range(count)}
    return {"$defs": {**parts, f"d{count}": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/d0"}] * 2}


def test_references_that_multiply_are_merged_once_each():
    assert compiled(levels(10, 10)) == compiled({"type": "integer"})
    small, large = (steps(lambda count=count: compiled(levels(count, 10))) for count in (5, 10))
    assert large < 2.2 * small


def test_references_that_double_are_one_rule_each():
    def doubling(count: int) -> dict:
        refs = [{"$ref": f"#/$defs/d{at + 1}"} for at in range(count)]
        parts = {f"d{at}": {"type": "object", "properties": {"a": ref, "b": ref}} for at, ref in enumerate(refs)}
        return {"$defs": {**parts, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}

    assert len(compiled(doubling(30))) < 2.2 * len(compiled(doubling(15)))


@pytest.mark.parametrize("count", [12, 40])
@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_references_of_many_levels_are_refused_for_little(key, count):
    assert steps(lambda: compiled(levels(count, 10, key))) < 50_000


def test_a_chain_of_references_ends():
    chain = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(1500)}
    with pytest.raises(InvalidRequestError, match=r"leads on through more than 32 references at '#'"):
        validate_schema({"$defs": {**chain, "d1500": {}}, "$ref": "#/$defs/d0"}, "p")


async def test_what_takes_long_in_the_brief_lane_is_stopped_however_little_is_counted(monkeypatch):
    monkeypatch.setattr(text_thread_pool, "SHORT_LANE_SECONDS", 0)
    schema = json.dumps({"enum": [f"{at} once" for at in range(2000)]})
    lanes = []

    def work() -> str:
        lanes.append(threading.current_thread().name.split("_")[0])
        return json_schema_grammar(schema, True)

    with closing(TextThreadPool()) as workers:
        assert "root" in await workers.run(work, INLINE_CHARACTERS + 1)
    assert lanes == ["llmops-text", "llmops-long"]


TOO_MUCH = {
    "pattern": {"type": "string", "pattern": "^(.*a){12}$", "maxLength": 250},
    "places": {"type": "object", "properties": {f"p{at}": {"pattern": "(.*a){9}"} for at in range(40)}},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("schema", TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_takes_too_much_work_is_refused_whether_strict_or_not(schema, strict, monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_STEPS", 100_000)
    guide = Guide("json_schema", validate_schema(schema, "guided_json"))
    with pytest.raises(InvalidRequestError, match="'guided_json' cannot be used: it is too complex"):
        compile_guide(guide, ["ebnf_grammar"], strict, "guided_json")


def test_a_grammar_has_no_more_than_so_many_characters():
    letters = "".join(chr(200 + 2 * at) for at in range(2000))
    with pytest.raises(NotEnforceableError, match="its grammar would be too large"):
        json_schema_grammar(json.dumps({"type": "string", "pattern": f"^[{letters}]{{1,2000}}$"}), True)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 300)), max_size=60))
def test_what_is_remembered_has_no_more_than_so_many_characters(asked):
    memory, texts = grammar_cache.GrammarCache(2000), {}
    for name, length in asked:
        key = ("schema", str(name), True)
        texts.setdefault(name, "x" * length)
        if memory.get(key) is None:
            memory.put(key, texts[name])
        assert memory.get(key) == texts[name], "the newest is there"
    kept = [name for name in texts if memory.get(("schema", str(name), True)) is not None]
    assert sum(len(texts[name]) for name in kept) <= 2000 - grammar_cache._ENTRY_OVERHEAD * len(kept)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"patternProperties": 5}, "'patternProperties' must be an object"),
        ({"propertyNames": {"pattern": "("}}, "the pattern is not a regular expression: missing )"),
        ({"propertyNames": 5}, "'propertyNames' must be a schema"),
        ({"items": 5}, "'items' must be a schema"),
        ({"unevaluatedProperties": "x"}, "'unevaluatedProperties' must be a schema"),
        ({"minimum": "x"}, "'minimum' must be a number"),
        ({"format": []}, "'format' must be a string"),
    ],
)
def test_a_keyword_of_the_wrong_kind_is_named_with_its_place(schema, says):
    with pytest.raises(InvalidRequestError) as refused:
        validate_schema({"properties": {"x": {"type": "object", **schema}}}, "p")
    assert says in str(refused.value)
    assert " at '/properties/x" in str(refused.value)


BOUNDS = [{"multipleOf": 1e-300, "maximum": 1e300}, {"minimum": 10**3000}, {"minimum": 1e308}]
ODD = [*({"type": "number", **bounds} for bounds in BOUNDS), {"enum": [1e300, 7], "multipleOf": 1e-300}]
ODD += [{"type": "object", "propertyNames": False, **more} for more in ({}, {"properties": {"a": {}}})]


@pytest.mark.parametrize("schema", ODD)
def test_odd_schemas_have_a_grammar_or_a_reason(schema):
    guide = Guide("json_schema", validate_schema(schema, "p"))
    for strict in (True, False):
        try:
            assert compile_guide(guide, ["ebnf_grammar"], strict, "p").text.startswith("root ::= ")
        except InvalidRequestError as refused:
            assert "'p' cannot be used" in str(refused)  # noqa: PT017 - either is right


RUNS = st.lists(st.tuples(st.sampled_from(OPENINGS), st.integers(1, 40)))


@given(RUNS.map(lambda runs: "".join(opening * count for opening, count in runs)))
def test_each_character_of_a_grammar_is_read_once(text):
    """Each token begins where the last one ended, and an unclosed token ends the reading."""
    at = 0
    for part in _TOKEN.finditer(text):
        assert part.start() == at
        at = part.end()
        if part.lastgroup == "unclosed":
            assert find_ebnf_error(text) == "a string, a character class or a repetition is not closed"
            return
    assert at == len(text)


# 10,000 of them took xgrammar 0.1.25, and with it all answers of an engine, half a minute
MANY = "it has more than 2,048 rules, groups and repetitions (groups count twice, and repetitions with numbers "
MANY += "count four times)"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('root ::= "a" # b "\n', None),
        ("root ::= [\\]] | [^\"]", None),
        ("root ::= x{1,3}\nx\n::= ('a' )", "a string, a character class or a repetition is not closed"),
        ("root ::= x{1,3}\nx\n::= (\"a\" )", None),
        ("root ::= x{1,3", "a string, a character class or a repetition is not closed"),
        ('root ::= "a', "a string, a character class or a repetition is not closed"),
        ('root ::= "a\\"', "a string, a character class or a repetition is not closed"),
        ("root ::= [a\n]", "a string, a character class or a repetition is not closed"),
        ("root ::= a b\na ::= \"x\"", "the rule 'b' is used but not defined"),
        ("a ::= \"x\"", "it has no rule 'root ::= …'"),
        ("root ::= (\"x\"", "its parentheses do not match"),
        ('root ::= "x")', "its parentheses do not match"),
        ('root ::= (("x"))', None),
        ('root ::= "a" ::= "b"', "a '::=' does not follow the name of a rule"),
        ('root "x"', "it has no rule 'root ::= …'"),
        ('root (::= "x")', "it has no rule 'root ::= …'"),
        ('root # comment\n ::= a-b.c\na-b.c ::= "x"', None),
        ('root ::= "x" \0', "it has the character U+0000"),
        ('root ::= c | b\nd ::= "x"', "the rule 'b' is used but not defined"),
        ("root ::= 'x'", "a string, a character class or a repetition is not closed"),
        # 25,000 levels overflow the stack of the engine's process in xgrammar 0.1.25
        ("root ::= " + "(" * 257 + '"x"' + ")" * 257, "its parentheses are nested deeper than 256 levels"),
        ("root ::= " + "(" * 256 + '"x"' + ")" * 256, None),
        ("root ::= [a]]", "a string, a character class or a repetition is not closed"),
        ("root ::= " + '"a"? ' * 2047, None),
        ("root ::= " + '"a"? ' * 2048, MANY),
        ("root ::= " + '("a"|"b") ' * 1024, MANY),
        ("root ::= " + '"a"{2} ' * 512, MANY),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_grammar(text, problem):
    assert find_ebnf_error(text) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("root ::= .", "the rule '.' is used but not defined"),
        ('root ::= é\né ::= "x"', "it has 'é' outside of a string"),
        ('root ::= "a", "b"', "it has ',' outside of a string"),
        ('root ::= "a"\nroot ::= "b"', "the rule 'root' is defined twice"),
        ('root ::= "a" |', 'an alternative is empty: write "" for the empty string'),
        ('root ::= a\na ::=\nb ::= "x"', 'an alternative is empty: write "" for the empty string'),
        ('root ::= "a" (| "b")', 'an alternative is empty: write "" for the empty string'),
        ('root ::= ("a" | )', 'an alternative is empty: write "" for the empty string'),
        ('root ::= "a" | *', "a repetition has nothing before it"),
        ('root ::= "a"??', "a repetition follows another, which engines read in different ways: use parentheses"),
        ('root ::= "a"{1} {1}', "a repetition follows another, which engines read in different ways: use parentheses"),
        ('root ::= "a"{,2}', "{,2} is not a number of repetitions"),
        ('root ::= "a"{3,2}', "{3,2} is not a number of repetitions"),
        ('root ::= "\\q"', "a backslash before 'q' has no meaning"),
        ("root ::= [\\d]", "a backslash before 'd' has no meaning"),
        ('root ::= "\\x"', "a backslash before 'x' has no meaning"),
        ('root ::= "\\u12"', "a backslash before 'u' has no meaning"),
        ("root ::= [\\U0010FFF]", "a backslash before 'U' has no meaning"),
        ('root ::= "\\/"', "a backslash before '/' has no meaning"),
        ("root ::= [z-a]", "the character class [z-a] has a range whose end is before its beginning"),
        ("root ::= [^\\n-\\t]", "the character class [^\\n-\\t] has a range whose end is before its beginning"),
        ("root ::= [b--]", "the character class [b--] has a range whose end is before its beginning"),
        ('root ::= "a"{1 2}', "{1 2} is not a number of repetitions"),
        ('root ::= # c\r"a', "a string, a character class or a repetition is not closed"),
        ('root ::= "a\rb"', "a string, a character class or a repetition is not closed"),
        ('root ::=\f"a"', "it has '\\x0c' outside of a string"),
        ('"a"\nroot ::= "b"', "it does not begin with a rule"),
        ('root ::= "a" b ::= "b"', "the rule 'b' does not begin a line"),
        ('root ::= ("a"\nb ::= "b")', "its parentheses do not match"),
        ('root ::= "a") ("b"', "its parentheses do not match"),
        ('root ::= true\ntrue ::= "a"', "'true' cannot be the name of a rule"),
        ('root ::= (="a")', "a lookahead (= …) must be one sequence at the end of a rule"),
        ('root ::= ("a" (="b"))', "a lookahead (= …) must be one sequence at the end of a rule"),
        ('root ::= "a" (="b") "c"', "a lookahead (= …) must be one sequence at the end of a rule"),
        ('root ::= "a" (="b" | "c")', "a lookahead (= …) must be one sequence at the end of a rule"),
        ('root ::= "a" (="")', "a lookahead (= …) must be one sequence at the end of a rule"),
        ('root ::= "a" (=)', "a lookahead (= …) must be one sequence at the end of a rule"),
        ('root ::= "a" (="b"{0})', "a lookahead (= …) must be one sequence at the end of a rule"),
        # misread by 0.1.25, or the end of its process with a repetition beside it
        ("root ::= [\\x110000]", "[\\x110000] has a number that is not the code of a character"),
        ("root ::= []", "a character class is empty"),
        ("root ::= [^\\x80]", "the character class [^\\x80] cannot exclude U+0080 in TensorRT-LLM 1.2.1"),
        ("root ::= [^a-む]", "the character class [^a-む] cannot exclude U+3080 in TensorRT-LLM 1.2.1"),
        ("root ::= [^む-め\\x7f\\x81] [む]", None),
        ('root ::= "a"{2147483648}', "{2147483648} is not a number of repetitions"),
        ('root ::= .x [\\^\\\\d] "\\\\q" () "" | "a"{2,}"b"{0,5}"c"{2}\n.x ::= -y\n-y ::= "y"{ 1 , 3 }', None),
        ('root ::= "\\x4\\u00e9\\U0001F600" [--a-c-] [^-^] [\\--a] a\r\ta ::= "b" (= "c" [\\]])', None),
    ],
)  # fmt: skip
def test_a_grammar_that_xgrammar_cannot_read_reaches_no_engine(text, problem):
    """xgrammar.Grammar.from_ebnf raises for each but the last five, in 0.1.25 (TensorRT-LLM 1.2.0), 0.1.32 (1.2.1) and
    0.2.8.

    NVIDIA's backend reads it within a step, whose error ends all requests (guidedDecoder.cpp, build).
    """
    assert find_ebnf_error(text) == problem


def test_a_class_beyond_ascii_has_a_rule_of_its_own_beside_a_repetition():
    """Both in one rule, as in `"a"{5} [é]`, end the process of xgrammar 0.1.25 (TensorRT-LLM 1.2.0).

    The class has two rules because xgrammar copied a single one to the beginning of a sequence, as
    in `[é] "a"{5}`.
    """
    grammar = 'root ::= "[é]"{5}[é-ü]"b" | [é-ü] [\\u00e9] [a] [^é] [^a] # [é]'
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "guided_grammar": grammar}
    isolated = (
        'root ::= "[é]"{5} beyond-ascii0 "b" |  beyond-ascii0   beyond-ascii1  [a]  beyond-ascii2  [^a] # [é]'
        "\nbeyond-ascii0 ::= beyond-ascii0-\nbeyond-ascii0- ::= [é-ü]"
        "\nbeyond-ascii1 ::= beyond-ascii1-\nbeyond-ascii1- ::= [\\u00e9]"
        "\nbeyond-ascii2 ::= beyond-ascii2-\nbeyond-ascii2- ::= [^é]"
    )
    assert parse_guide(ChatRequest(**body)) == ("ebnf_grammar", isolated)
    assert isolate_classes('root ::= [é] | "beyond-ascii"{9}').endswith("\nbeyond-ascii-0- ::= [é]")
    body["guided_grammar"] = 'root ::= "a"{2} ' + "".join(f"[{chr(0x4E00 + at)}]" for at in range(2048))
    with pytest.raises(InvalidRequestError, match=re.escape(MANY)):
        parse_guide(ChatRequest(**body))


def test_a_grammar_has_a_limit():
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "guided_grammar": "root ::= " + "a" * 65_536}
    with pytest.raises(InvalidRequestError, match="must be an EBNF grammar of 1 to 65536 characters"):
        parse_guide(ChatRequest(**body))


MATCHERS = {"re.compile", "re.match", "re.search", "re.fullmatch", "re.sub", "re.subn", "re.split", "re.findall"}
MATCHERS |= {"re.finditer"}
# a file, and why what it gives to `re` is not written there; nothing that clients or models say may be
ALLOWED = {
    "text/control_tokens.py": "control tokens of the model, each escaped: an alternation of literals",
    "text/answer_features.py": "one class of letters for each script of a constant",
    "routing/quality/golden_prompts.py": "the package's own expressions; RE2 matches those of a file",
}


def test_no_expression_is_made_of_what_a_client_sends():
    """Python's matcher goes back: a few bytes of pattern stop everything (docs/decisions/0008)."""
    folder = Path(llmops.gateway.__file__).parent
    trees = {str(file.relative_to(folder)): ast.parse(file.read_text()) for file in folder.rglob("*.py")}
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]
    assert len(trees) > 100
    imported = [(name, node) for name, node in nodes if isinstance(node, ast.ImportFrom) and node.module == "re"]
    assert not [name for name, node in imported if any(f"re.{one.name}" in MATCHERS for one in node.names)]
    calls = [(name, node) for name, node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in MATCHERS]
    assert len(calls) > 20
    made = [(name, ast.unparse(call)) for name, call in calls if not isinstance(call.args[0], ast.Constant)]
    assert not [one for one in made if one[0] not in ALLOWED]


def test_no_long_schema_is_kept_after_its_check():
    """Before the fix, 50 refused requests with schemas of 15 MB left a gateway with 750 MB more."""
    _find_problem.cache_clear()
    with pytest.raises(InvalidRequestError, match="has 5000018 characters"):
        validate_schema({"description": "x" * 5_000_000}, "tools")
    assert validate_schema({"description": "x" * 60_000}, "tools")
    assert _find_problem.cache_info().currsize == 0
    assert validate_schema({"description": "x"}, "tools")
    assert _find_problem.cache_info().currsize == 1
