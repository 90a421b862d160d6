"""Anthropic's blocks and pages, as functions; tests/gateway/test_messages_wire.py has them on the wire."""

import json

import pytest

from llmops.gateway.api.anthropic.stream_events import tool_input
from llmops.gateway.api.models import model_page
from llmops.gateway.errors import InvalidRequestError


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
        with pytest.raises(InvalidRequestError, match=r"limit|id of a model"):
            model_page(models, wrong)
