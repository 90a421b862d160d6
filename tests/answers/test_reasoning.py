"""Thinking comes apart from the answer, however the text is cut."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.generation.parsers.families.hermes import HermesParser
from llmops.gateway.generation.parsers.output_processor import ProcessorChain, ReasoningDelta
from llmops.gateway.generation.parsers.reasoning import ReasoningParser, reasoning_effort_arguments, reasoning_markers
from tests.support.tool_texts import run

THINK = reasoning_markers("… </think> …")


def split(pieces, inside=False, tools=False):
    chain = ProcessorChain([ReasoningParser(THINK, inside), *([HermesParser()] if tools else [])])
    return [(type(piece).__name__, *piece) for piece in run(chain, pieces)]


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "inside", "thinking", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."), ("hm, so\n</think>\n\nYes.", True, "hm, so", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."), ("<think>cut off", False, "cut off", ""),
        ("Yes. <think> is a tag, </think> too.", False, "", "Yes. <think> is a tag, </think> too."),
        ("  <thin", False, "", "  <thin"), ("no thinking at all", False, "", "no thinking at all"),
        ("<think>a </thin b</think>c", False, "a </thin b", "c"),
    ],
)  # fmt: skip
def test_split(text, inside, thinking, answer, step):
    pieces = split([text[i : i + step] for i in range(0, len(text), step)], inside)
    assert pieces == [p for p in [("ReasoningDelta", thinking), ("ContentDelta", answer)] if p[1]]


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<th", "a", " ", "\n", "é", " " * 70]), max_size=10)


@given(PARTS, st.booleans())
def test_any_cut_gives_the_same(parts, inside):
    text = "".join(parts)
    assert split(list(text), inside) == split([text], inside) == split(parts, inside)


@given(PARTS, st.booleans(), st.data())
def test_the_place_of_the_thinking_is_known(parts, inside, data):
    text = "".join(parts)
    splitter = ReasoningParser(THINK, inside)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
    out = [piece for one in pieces for piece in splitter.feed(one)] + splitter.finish()
    thought = "".join(piece.text for piece in out if isinstance(piece, ReasoningDelta))
    spans = [text[start : len(text) if end == inf else end] for start, end in splitter.thinking]
    assert "".join(spans).strip()[: len(thought)] == thought.strip()[: len(thought)]
    assert bool(spans) or not thought
    for start, end in splitter.thinking:
        assert start == 0 or text[:start].endswith(THINK.start)
        assert end == inf or text[end:].startswith(THINK.end)


def test_a_call_named_in_the_thinking_is_no_call():
    text = '<think>I could write <tool_call>{"name": "f", "arguments": {}}</tool_call></think>\n'
    text += '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    pieces = split(list(text), tools=True)
    assert ([p[0] for p in pieces], pieces[1][3:]) == (["ReasoningDelta", "ToolCallDelta"], ("g", "{}"))


def test_effort_goes_where_the_template_takes_it():
    assert reasoning_effort_arguments("low", "{{ reasoning_effort }}") == {"reasoning_effort": "low"}
    assert reasoning_effort_arguments("none", "{% if enable_thinking %}") == {"enable_thinking": False}
    assert reasoning_effort_arguments("high", "{% if enable_thinking %}") == {"enable_thinking": True}
    assert reasoning_effort_arguments("high", "{% if not thinking is defined %}") == {"thinking": True}
    assert reasoning_effort_arguments("none", "{% if thinking is defined and thinking %}") == {"thinking": False}
    assert [reasoning_effort_arguments("high", text) for text in ("a word on thinking", "plain")] == [None, None]
    assert reasoning_effort_arguments("none", "plain") == {}
