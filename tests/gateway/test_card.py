"""Tests of the metadata that an engine model announces, as the gateway reads it."""

import json

import pytest

from llmops.errors import InputError
from llmops.gateway.interfaces import Capabilities, LoraAdapter, SamplingDefaults
from llmops.gateway.triton.model_metadata import parse_model_metadata

LEAST = {"contract": 2, "name": "a", "tokenizer_dir": "/t", "max_seq_len": 64, "vocab_size": 300, "end_ids": [2]}


def test_what_a_card_does_not_say_has_a_default():
    card = parse_model_metadata(json.dumps(LEAST))
    assert (card.name, card.target, card.end_ids, card.transports) == ("a", "unknown", (2,), ("request",))
    assert (card.capabilities, card.sampling, card.adapters) == (Capabilities(), SamplingDefaults(), ())


def test_parts_are_read_and_what_is_unknown_is_left_out():
    said = {
        "capabilities": {"n": 4, "guided": ["regex"], "from_the_future": True},
        "sampling": {"temperature": 0.5, "top_k": 20},
        "adapters": [{"name": "b", "id": 7}],
        "from_the_future": [1],
    }
    card = parse_model_metadata(json.dumps({**LEAST, **said}), {"name": "mine", "end_ids": [3, 4]})
    assert (card.name, card.end_ids) == ("mine", (3, 4)), "the configuration wins"
    assert card.capabilities == Capabilities(n=4, guided=("regex",))
    assert (card.sampling, card.adapters) == (SamplingDefaults(temperature=0.5, top_k=20), (LoraAdapter("b", 7),))


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"max_seq_len": 1}, r"cannot be used \(max_seq_len: it must be greater than 1\)"),
        ({"vocab_size": 0}, r"cannot be used \(vocab_size: it must be greater than 0\)"),
        ({"capabilities": {"n": 0}}, r"capabilities\.n: it must be at least 1"),
        ({"sampling": {"top_p": 0}}, r"sampling\.top_p: it must be greater than 0"),
        ({"end_ids": "two"}, r"end_ids: it must be a list"),
        ({"contract": 1}, r"speaks contract 1, this gateway 2; use the same llmops version"),
        *((text, "llmops_model_metadata is not a JSON object") for text in ("[1]", "{", "7")),
    ],
)
def test_a_card_that_cannot_be_used_is_one_sentence(said, fault):
    with pytest.raises(InputError, match=fault):
        parse_model_metadata(said if isinstance(said, str) else json.dumps({**LEAST, **said}))
