"""Requests that the engine takes or refuses: each refusal names its tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmops_engine.request import RequestRejectedError
from llmops_engine.tensor_parser import NEUTRAL_VALUES, SUPPORTED_INPUTS, EngineCapabilities, parse_request

from llmops.contract import ENGINE_INPUTS, EXTENSION_INPUTS

LIMITS = EngineCapabilities(target="openvino", max_seq_len=64, vocab_size=100, end_ids=frozenset({2, 3}))
TYPES = {tensor.name: tensor.data_type for tensor in [*ENGINE_INPUTS, *EXTENSION_INPUTS]}


def tensors(**values: Any) -> dict[str, np.ndarray]:
    given = {"input_ids": [1, 5, 6], "input_lengths": 3, "request_output_len": 10, **values}
    return {name: array(name, value) for name, value in given.items() if value is not None}


def array(name: str, value: Any) -> np.ndarray:
    if TYPES[name] == "TYPE_STRING":
        return np.array([[value.encode()]], dtype=object)
    kinds = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16, "TYPE_BOOL": np.bool_, "TYPE_UINT64": np.uint64}
    return np.array([value] if isinstance(value, list) else [[value]], dtype=kinds.get(TYPES[name], np.int32))


def test_the_least_request_gets_the_models_own_end_ids() -> None:
    request = parse_request(tensors(), LIMITS)
    assert request.input_ids.dtype == np.int64
    assert request.input_ids.tolist() == [1, 5, 6]
    assert (request.max_new_tokens, request.end_ids, request.num_sequences) == (10, {2, 3}, 1)
    assert not request.streaming


def test_end_id_replaces_them_and_minus_one_ignores_the_end() -> None:
    assert parse_request(tensors(end_id=7), LIMITS).end_ids == {7}
    assert parse_request(tensors(end_id=-1), LIMITS).end_ids == frozenset()


@pytest.mark.parametrize(
    ("values", "greedy"), [({"temperature": 0.0}, True), ({"runtime_top_k": 1}, True), ({}, False)]
)
def test_temperature_zero_and_top_k_one_are_greedy(values: dict[str, Any], greedy: bool) -> None:
    assert parse_request(tensors(**values), LIMITS).sampling.greedy is greedy


def test_padding_behind_the_input_length_is_not_the_prompt() -> None:
    request = parse_request(tensors(input_ids=[4, 5, 0, 0], input_lengths=2), LIMITS)
    assert request.input_ids.tolist() == [4, 5]


REFUSED = [
    ({"input_ids": None}, "input_ids: at least one token"),
    ({"input_ids": [1, 5, 100]}, "input_ids: ids must be from 0 to 99"),
    ({"input_ids": [-1, 5, 6]}, "input_ids: ids must be from 0 to 99"),
    ({"input_lengths": 4}, "input_lengths: 4 does not fit the 3 tokens"),
    ({"request_output_len": 0}, "request_output_len: must be at least 1"),
    ({"request_output_len": 62}, "request_output_len: 3 prompt tokens and 62 new ones are more than the 64"),
    ({"min_tokens": 11}, "min_tokens: must be from 0 to 10"),
    ({"num_return_sequences": 9}, "num_return_sequences: must be from 1 to 8"),
    ({"temperature": -0.1}, "temperature: must be from 0.0 to 100.0"),
    ({"temperature": float("nan")}, "temperature: must be"),
    ({"runtime_top_p": 1.5}, "runtime_top_p: must be from 0.0 to 1.0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: must be greater than 0"),
    ({"end_id": 100}, "end_id: must be below 100"),
    ({"embedding_bias": [0.0, 1.0]}, "embedding_bias: not supported by target openvino"),
    ({"bad_words_list": [[5], [1]]}, "bad_words_list: not supported by target openvino"),
    ({"beam_width": 4}, "beam_width: only 1 is supported by target openvino"),
    ({"exclude_input_in_output": False}, "exclude_input_in_output: only true is supported"),
    ({"draft_input_ids": [1]}, "draft_input_ids: not supported by target openvino"),
    ({"prompt_table_extra_ids": [1]}, "prompt_table_extra_ids: not supported"),
    ({"lora_task_id": 5}, "lora_task_id: only 0 is supported"),
    ({"guided_decoding_guide_type": "yaml"}, "guided_decoding_guide_type: must be one of json, json_schema"),
    ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: is needed for the type regex"),
    ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type: is needed"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejectedError) as refusal:
        parse_request(tensors(**values), LIMITS)
    assert str(refusal.value).startswith(message)


def test_a_batch_in_one_request_is_refused() -> None:
    batch = {"input_ids": np.array([[1], [2]], dtype=np.int32)}
    with pytest.raises(RequestRejectedError, match=r"^input_ids: one sequence per request, got a batch of 2"):
        parse_request({**tensors(), **batch}, LIMITS)


@pytest.mark.parametrize("tensor", [t for t in ENGINE_INPUTS if t.name not in SUPPORTED_INPUTS], ids=lambda t: t.name)
def test_no_input_of_tensorrt_llm_is_dropped_silently(tensor: Any) -> None:
    value = {"TYPE_BOOL": [[tensor.name != "exclude_input_in_output"]]}.get(tensor.data_type, [[77]])
    with pytest.raises(RequestRejectedError, match=f"^{tensor.name}: "):
        parse_request({**tensors(), tensor.name: np.array(value)}, LIMITS)


@pytest.mark.parametrize(("name", "value"), [(name, values[0]) for name, values in NEUTRAL_VALUES.items()])
def test_neutral_values_of_other_inputs_are_taken(name: str, value: Any) -> None:
    assert parse_request({**tensors(), name: np.array([[value]])}, LIMITS)
