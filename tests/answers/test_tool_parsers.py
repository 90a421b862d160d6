"""Tool calls out of text: the forms that the model families really write, whole and cut anywhere."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.generation.parsers.families import PARSERS
from llmops.gateway.generation.parsers.forced_calls import NamedCallProcessor, RequiredCallsProcessor
from llmops.gateway.generation.parsers.output_processor import ToolCallDelta
from llmops.gateway.generation.parsers.tool_parser import new_mistral_call_id
from tests.support import tool_texts
from tests.support.tool_texts import ARGUMENTS, FRAGMENTS, PROSE, TAGGED, TOOLS, WRITERS, cut, read, run, shape

TEXTS = yaml.safe_load(Path(__file__).with_name("tool_call_texts.yaml").read_text())
CASES = [(family, one) for family, cases in TEXTS.items() for one in cases]


@pytest.mark.parametrize("step", [10**9, 1, 2, 3, 7])
@pytest.mark.parametrize(("family", "case"), CASES)
def test_known_forms(family, case, step):
    text, calls = case["text"], case.get("calls", ())
    prose = case.get("prose", "" if calls else text)
    found = read(PARSERS[family](TOOLS), [text[at : at + step] for at in range(0, len(text), step)])
    assert found == (prose, [("get_weather", arguments) for arguments in calls])


@pytest.mark.parametrize("family", PARSERS)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.data())
def test_any_text_cut_anywhere_gives_the_same_events(family, text, data):
    whole = run(PARSERS[family](TOOLS), [text])
    assert shape(run(PARSERS[family](TOOLS), list(text))) == shape(whole)
    assert shape(run(PARSERS[family](TOOLS), cut(data, text))) == shape(whole)


@pytest.mark.parametrize("family", PARSERS)
@given(st.text(st.characters(exclude_characters="{[<", codec="utf-8")))
def test_text_without_markup_is_unchanged(family, text):
    assert tool_texts.text_of(run(PARSERS[family](TOOLS), list(text))) == text


@pytest.mark.parametrize("family", [family for family in PARSERS if family not in TAGGED])
@given(PROSE, st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3), st.data())
def test_what_a_model_wrote_comes_back(family, prose, calls, data):
    assert read(PARSERS[family](TOOLS), cut(data, prose + WRITERS[family](calls))) == (prose, calls)


@given(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3), st.data())
def test_forced_list(calls, data):
    text = json.dumps([{"name": n, "arguments": a} for n, a in calls], indent=data.draw(st.sampled_from([None, 2])))
    assert read(RequiredCallsProcessor(), cut(data, text)) == ("", calls)


@given(ARGUMENTS, st.data())
def test_forced_name(arguments, data):
    _, calls = read(NamedCallProcessor("add"), cut(data, json.dumps(arguments) + " \n"))
    assert calls == [("add", arguments)]


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
    assert [(n, a.replace(" ", "")) for n, a in tool_texts.calls_of(events)] == [("add", '{"text":"abc')]


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_a_value_that_is_nested_too_deeply_is_no_traceback(family):
    """Before the fix, a thousand brackets beside a call's name ended the answer with an error of the server."""
    opening = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]["}[family]
    nested = "[" * 100_000 + "]" * 100_000
    _, calls = read(PARSERS[family](TOOLS), [f'{opening}{{"name": "now", "id": {nested}, "arguments": {{}}}}'])
    assert calls == [("now", {})]


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
    text = WRITERS[family]([("add", {"text": "word " * 2000, "list": list(range(500))})])
    parser = PARSERS[family](TOOLS)
    for i in range(0, len(text), 5):
        parser.feed(text[i : i + 5])
        assert len(parser._buffer) - parser._pos < 200
