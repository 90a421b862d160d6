"""Anthropic's blocks, as functions; tests/gateway/test_messages_wire.py has them on the wire."""

import json

import pytest

from llmops.gateway.api.anthropic.stream_events import tool_input


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Par', {}), ('{"city": "Paris", "da', {"city": "Paris"}),
        ('{"city" "Paris"}', {"INVALID_JSON": '{"city" "Paris"}'}),
        ('{"far": 1e999}', {"INVALID_JSON": '{"far": 1e999}'}), ("[1, 2]", {"INVALID_JSON": "[1, 2]"}), ("", {}),
    ],
)  # fmt: skip
def test_arguments_that_are_no_whole_object(arguments, seen):
    assert tool_input(arguments) == seen
    json.dumps(tool_input(arguments), allow_nan=False)
