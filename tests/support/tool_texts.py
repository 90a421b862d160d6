"""Shared parts of the tool parser tests.

They show how models write calls, and how their events are read.
"""

import json
import re

from hypothesis import strategies as st

from llmops.gateway.generation.parsers.output_processor import ContentDelta, ToolCallDelta, merge_adjacent

PROPERTIES = {
    "text": {"type": "string"},
    "list": {"type": "array"},
    "city": {"type": "string"},
    "n": {"type": "integer"},
}
TOOLS = {name: {"type": "object", "properties": PROPERTIES} for name in ("get_weather", "add", "now", "ns.tool-x")}


def run(stage, pieces):
    events = [event for piece in pieces for event in stage.feed(piece)]
    return merge_adjacent(events + stage.finish())


def calls_of(events):
    """`[(name, arguments text)]`, checking the numbering on the way."""
    calls = []
    for event in events:
        if isinstance(event, ToolCallDelta):
            if event.name:
                assert event.index == len(calls)
                assert event.id
                calls.append([event.name, ""])
            assert event.index == len(calls) - 1
            calls[-1][1] += event.arguments
    return [tuple(call) for call in calls]


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def shape(events):
    """Events without the random ids."""
    return [(type(e), *(e._replace(id=None) if isinstance(e, ToolCallDelta) else e)) for e in events]


def read(stage, pieces):
    """Return the text and the calls that a parser finds."""
    events = run(stage, pieces)
    return text_of(events), [(name, json.loads(arguments)) for name, arguments in calls_of(events)]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>",
    "<|python_end|>", "{", "}", "[", "]", "(", ")", '"', "'", ":", ",", ";", "=", "\\", " ", "\n", "name",
    "get_weather", "arguments", "parameters",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "parameters": {}}',
    "[add(a=1, b='x')]", "now()", '"name": "add"', '"arguments": {', "é🦙", "text", "null", "1", " " * 70, "\t",
    '"id": "x"', "function", "\\u00", "'''",
    "<function=", "</function>", "<parameter=", "</parameter>", ">", "<", "text>", "3",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "```json", "```",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final",
    "commentary to=functions.add",
    "<|constrain|>json",
]  # fmt: skip


def cut(data, text):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


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


def qwen_value(value):
    """Return the value as Qwen's template writes it: only lists and objects as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def qwen_coder(name, arguments):
    written = "".join(f"<parameter={key}>\n{qwen_value(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm(name, arguments):
    values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    written = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    return f"<tool_call>{name}\n{written}</tool_call>"


def deepseek(calls):
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


WRITERS = {
    "qwen_coder": lambda calls: "\n".join(qwen_coder(n, a) for n, a in calls),
    "glm": lambda calls: "\n".join(glm(n, a) for n, a in calls),
    "deepseek": deepseek,
    "kimi": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
            for i, (n, a) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "hermes": lambda calls: "".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>\n" for n, a in calls
    ),
    "llama3": lambda calls: "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
    "pythonic": lambda calls: (
        "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"
    ),
}

TAGGED = ("qwen_coder", "glm")
