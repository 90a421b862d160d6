"""Anthropic's blocks and events: whatever pieces an answer comes in, its SDK puts the events together as the blocks."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from anthropic._streaming import SSEDecoder
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.api.anthropic.stream_events import (
    MessageEvents,
    content_blocks,
    message_usage,
    stop_fields,
    tool_input,
)
from llmops.gateway.api.models import model_page
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.answer import ChoiceDelta
from llmops.gateway.generation.parsers.output_processor import ContentDelta, ReasoningDelta, ToolCallDelta
from llmops.gateway.interfaces import Usage

HEAD = {"id": "msg_1", "type": "message", "role": "assistant", "model": "tiny", "content": [], "stop_reason": None}
WORDS = st.text('a\u00e9"\\\n\U0001f642 ', min_size=1, max_size=6)
OBJECTS = ({}, {"a": 1}, {"": " "}, {"a": "\u00e9\n", "b": [1, -2.5e3, None]}, {"a": {"b": {"c": [True, [[]]]}}})
ARGUMENTS = st.sampled_from(OBJECTS).map(json.dumps)


@st.composite
def answers(draw):
    """Pieces in groups, as tokens bring them; the last call may be cut off anywhere."""
    pieces, calls = [], 0
    for kind in draw(st.lists(st.sampled_from("trc"), max_size=6)):
        text = draw(ARGUMENTS if kind == "c" else WORDS)
        if kind == "c":
            pieces.append(ToolCallDelta(calls, f"call_{calls}", "f"))
        cuts = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=4))})
        parts = [text[start:end] for start, end in pairwise(cuts)]
        make = {"t": ContentDelta, "r": ReasoningDelta, "c": lambda part, at=calls: ToolCallDelta(at, arguments=part)}[
            kind
        ]
        pieces += map(make, parts)
        calls += kind == "c"
    if pieces and isinstance(pieces[-1], ToolCallDelta) and pieces[-1].id is None:
        pieces[-1] = pieces[-1]._replace(arguments=pieces[-1].arguments[: draw(st.integers(0, 20))])
    groups = [[]]
    for piece in pieces:
        groups[-1].append(piece)
        if draw(st.booleans()):
            groups.append([])
    return groups


class Scripted:
    """A choice whose processor has sorted its text already."""

    finish_reason, stop_reason = "stop", None

    def __init__(self, groups):
        self.groups = iter(groups)
        self.plain = all(isinstance(piece, ContentDelta) for group in groups for piece in group)

    def sort(self, text):
        if self.plain:
            return [ContentDelta(text)] if text else []
        return next(self.groups)


def message_of(events):
    snapshot, buffers = None, {}
    for event in SSEDecoder().iter_bytes(iter([events])):
        if event.event != "ping":
            snapshot = accumulate_event(event=event.json(), current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


@given(answers())
def test_events_add_up_to_the_blocks(groups):
    choice = Scripted(groups)
    usage = Usage(prompt_tokens=3, completion_tokens=5, reasoning_tokens=1)
    answer = SimpleNamespace(choices=[choice], usage=usage)
    events = MessageEvents(answer, HEAD, lambda one, called: stop_fields(one, called=called, cut=False), bytes)
    # what the text of a plain choice is, the shortest way takes from the delta itself
    texts = ["".join(piece.text for piece in group) if choice.plain else "" for group in groups]
    sent = b"".join(events.render(ChoiceDelta(choice, text, False)) for text in texts) + events.end()
    pieces = [piece for group in groups for piece in group]
    called = any(isinstance(piece, ToolCallDelta) for piece in pieces)
    message = message_of(sent)
    assert message["content"] == content_blocks(pieces)
    assert message["stop_reason"] == ("tool_use" if called else "end_turn")
    assert message["usage"] == message_usage(answer)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Par', {}),
        ('{"city": "Paris", "da', {"city": "Paris"}),
        ('{"city" "Paris"}', {"INVALID_JSON": '{"city" "Paris"}'}),
        ('{"far": 1e999}', {"INVALID_JSON": '{"far": 1e999}'}),
        ("[1, 2]", {"INVALID_JSON": "[1, 2]"}),
        ("", {}),
    ],
)
def test_arguments_that_are_no_whole_object(arguments, seen):
    assert tool_input(arguments) == seen
    json.dumps(tool_input(arguments), allow_nan=False)


def test_pages_of_models():

    models = [{"id": name, "created": 0, "max_model_len": 9} for name in "abcde"]

    def ids(**query):
        page = model_page(models, query)
        shown = "".join(model["id"] for model in page["data"])
        assert (page["first_id"], page["last_id"]) == ((shown[0], shown[-1]) if shown else (None, None))
        return shown, page["has_more"]

    assert ids() == ("abcde", False)
    assert ids(limit="2") == ("ab", True)
    assert ids(limit="2", after_id="b") == ("cd", True)
    assert ids(limit="2", after_id="c") == ("de", False)
    assert ids(after_id="e") == ("", False)
    assert ids(limit="2", before_id="e") == ("cd", True)
    assert ids(limit="2", before_id="c") == ("ab", False)
    for wrong in ({"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after_id": "z"}, {"before_id": ""}):
        with pytest.raises(InvalidRequestError, match=r"limit|names a model"):
            model_page(models, wrong)
