"""A response sent again is event for event what was sent when it was generated."""

import copy
import itertools
import tracemalloc
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.conversations.response_builder import ResponseBuilder, new_response, replay_events
from llmops.gateway.errors import EngineError
from llmops.gateway.generation.parsers.output_processor import ContentDelta, ReasoningDelta, ToolCallDelta
from llmops.gateway.interfaces import SamplingDefaults, Usage
from llmops.gateway.schemas.responses_request import ResponsesRequest

MODEL = SimpleNamespace(name="tiny", card=SimpleNamespace(sampling=SamplingDefaults()))
WORDS = st.text(min_size=1, max_size=4)
PIECES = st.one_of(
    WORDS.map(ContentDelta),
    WORDS.map(ReasoningDelta),
    st.tuples(st.integers(0, 2), WORDS | st.just("")).map(lambda p: ToolCallDelta(p[0], f"call_{p[0]}", "f", p[1])),
)
ENDS = ("stop", "length", "tool_calls", "error", "cancel", "")


def finished(builder, end):
    if end == "error":
        return builder.fail(EngineError("broke").body()["error"])
    if end == "cancel":
        builder.cancel()
        return []
    return builder.finish(end, Usage(3, 4, 1)) if end else []


@given(st.lists(PIECES, max_size=12), st.sampled_from(ENDS))
def test_the_same_events(pieces, end):
    builder = ResponseBuilder(new_response(ResponsesRequest(model="tiny", input="x"), MODEL))
    sent = copy.deepcopy(builder.start())
    for piece in pieces:
        sent += copy.deepcopy(builder.add(piece))
    sent += copy.deepcopy(finished(builder, end))
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    state = builder.so_far()
    assert list(replay_events(copy.deepcopy(state), builder.cuts)) == sent
    text = "".join(piece.text for piece in pieces if isinstance(piece, ContentDelta))
    output = [item for item in state["output"] if item["type"] == "message"]
    assert "".join(part["text"] for item in output for part in item["content"]) == text


def test_a_replay_makes_each_event_when_it_is_sent():
    """60 unread replays of an answer of 60,000 tokens took 1,303 MB."""
    part = {"type": "output_text", "text": "x" * 60_000, "annotations": [], "logprobs": []}
    answer = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    events = replay_events({"id": "r", "status": "completed", "output": [answer]}, [[1] * 60_000])
    tracemalloc.start()
    first = list(itertools.islice(events, 200))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [event["sequence_number"] for event in first] == list(range(200))
    assert peak < 1 << 20
