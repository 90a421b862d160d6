"""Requests that the engine takes or refuses: each refusal names its tensor."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmops_engine.request import RequestRejectedError
from llmops_engine.runtimes.stop_words import StopWordMatcher
from llmops_engine.tensor_parser import NEUTRAL_VALUES, SUPPORTED_INPUTS, EngineCapabilities, parse_request, word_list
from llmops_engine.tensor_parser import word_list as read_words
from llmops_preprocessing.word_lists import embedding_bias, encode_word_list
from tokenizers import Tokenizer, models

from llmops import contract
from llmops.contract import ENGINE_INPUTS, EXTENSION_INPUTS
from tests.support.model_code import version_folder

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
    assert (request.input_ids.dtype, request.input_ids.tolist()) == (np.int64, [1, 5, 6])
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
    ({"input_ids": None}, "input_ids: empty; send at least one token"),
    ({"input_ids": [1, 5, 100]}, "input_ids: ids must be from 0 to 99"),
    ({"input_ids": [-1, 5, 6]}, "input_ids: ids must be from 0 to 99"),
    ({"input_lengths": 4}, "input_lengths: 4 does not fit the 3 tokens"),
    ({"request_output_len": 0}, "request_output_len: must be at least 1"),
    ({"request_output_len": 62}, "request_output_len: 3 prompt tokens and 62 new tokens exceed max_seq_len, 64"),
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
    with pytest.raises(RequestRejectedError, match=r"^input_ids: must be one sequence per request, got a batch of 2"):
        parse_request({**tensors(), **batch}, LIMITS)


@pytest.mark.parametrize("tensor", [t for t in ENGINE_INPUTS if t.name not in SUPPORTED_INPUTS], ids=lambda t: t.name)
def test_no_input_of_tensorrt_llm_is_dropped_silently(tensor: Any) -> None:
    value = {"TYPE_BOOL": [[tensor.name != "exclude_input_in_output"]]}.get(tensor.data_type, [[77]])
    with pytest.raises(RequestRejectedError, match=f"^{tensor.name}: "):
        parse_request({**tensors(), tensor.name: np.array(value)}, LIMITS)


@pytest.mark.parametrize(("name", "value"), [(name, values[0]) for name, values in NEUTRAL_VALUES.items()])
def test_neutral_values_of_other_inputs_are_taken(name: str, value: Any) -> None:
    assert parse_request({**tensors(), name: np.array([[value]])}, LIMITS)


# -- TensorRT-LLM's word lists: what the tokenizer model writes, the engine model reads; and words found in a stream


words = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6)


@given(words)
def test_a_word_list_survives_the_way_to_the_engine(given_words: list[list[int]]) -> None:
    tensor = encode_word_list(given_words)
    assert (tensor.dtype, tensor.shape[:2]) == (np.int32, (1, 2))
    assert read_words(tensor, "stop_words_list") == given_words


def test_the_layout_is_tensorrt_llms() -> None:
    # ids of all words in row 0, where each word ends in row 1, padded with -1
    assert encode_word_list([[5], [7, 8, 9]]).tolist() == [[[5, 7, 8, 9], [1, 4, -1, -1]]]


def test_an_offset_outside_the_ids_is_refused_by_name() -> None:
    with pytest.raises(RequestRejectedError, match=r"^stop_words_list: offset 9 is not within the 2 ids"):
        read_words(np.array([[[1, 2], [9, -1]]]), "stop_words_list")


@given(words.filter(bool), st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(1, 5), min_size=1))
def test_a_stop_word_is_found_wherever_the_steps_cut_it(stop_words, tokens, sizes):
    def ends_with_a_stop_word(end: int) -> bool:
        return any(tokens[max(0, end - len(word)) : end] == word for word in stop_words)

    expected = next(filter(ends_with_a_stop_word, range(1, len(tokens) + 1)), None)
    matcher, position, turn = StopWordMatcher(stop_words), 0, 0
    while position < len(tokens):
        step = tokens[position : position + sizes[turn % len(sizes)]]
        turn += 1
        kept = matcher.find(step)
        if kept is not None:
            assert position + kept == expected
            return
        position += len(step)
    assert expected is None


def test_embedding_bias_needs_a_weight_for_each_word() -> None:
    with pytest.raises(ValueError, match=r"^embedding_bias_weights: 1 weights for 2 embedding_bias_words"):
        embedding_bias(None, ["a", "b"], [1.0], 10)


# -- Tests of the places in which the tokenizer model puts a model's further ends of text


def load(folder: Path, ours: bool, takes_bias: bool = False):
    """The model as Triton initialises it, with `end_ids` 2, 8 and 9."""
    model = runpy.run_path(str(version_folder("preprocessing") / "model.py"))
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    parameters = {"tokenizer_dir": str(folder), "add_special_tokens": "true", "end_ids": "[2, 8, 9]", "pad_id": "2",
                  "vocab_size": "10", "logit_bias": json.dumps(takes_bias)}  # fmt: skip
    outputs = [contract.PRE_OUT_IDS, *([contract.PRE_OUT_RETURN_CONTEXT] if ours else [])]
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()},
              "output": [{"name": one.name} for one in outputs]}  # fmt: skip
    made = model["TritonPythonModel"]()
    made.initialize({"model_config": json.dumps(config)})
    return made


@pytest.mark.parametrize(
    ("ours", "least", "stop", "bad"),
    [
        (False, None, [[8], [9]], []),
        (False, 0, [[8], [9]], []),
        # the backend's penalty withholds end_id alone (cpp/tensorrt_llm/kernels/penaltyKernels.cu)
        (False, 5, [], [[8], [9]]),
        (True, 5, [[8], [9]], []),
    ],
)
def test_min_tokens_holds_for_every_end_of_text(tmp_path, ours, least, stop, bad):
    given = {"QUERY": np.array([[b"a"]], object), "REQUEST_OUTPUT_LEN": np.array([[9]], np.int32)}
    if least is not None:
        given["MIN_TOKENS"] = np.array([[least]], np.int32)
    made = load(tmp_path, ours)._tensors(given)
    assert word_list(made[contract_tensor(made, "STOP_WORDS_IDS")], "stop") == stop
    assert word_list(made[contract_tensor(made, "BAD_WORDS_IDS")], "bad") == bad


def test_words_are_favoured_only_where_the_engine_takes_a_bias(tmp_path):
    """A bias that NVIDIA's backend cannot take ends all requests (1.2.1
    cpp/tensorrt_llm/batch_manager/createNewDecoderRequests.cpp, initializeEmbeddingBias).
    """
    given = {"QUERY": np.array([[b"a"]], object), "REQUEST_OUTPUT_LEN": np.array([[9]], np.int32),
             "EMBEDDING_BIAS_WORDS": np.array([[b"b"]], object),
             "EMBEDDING_BIAS_WEIGHTS": np.array([[2.0]], np.float32)}  # fmt: skip
    made = load(tmp_path, False, takes_bias=True)._tensors(given)
    assert made[contract_tensor(made, "EMBEDDING_BIAS")][0, :2].tolist() == [0.0, 2.0]
    with pytest.raises(ValueError, match=r"^embedding_bias_words: not supported by this engine$"):
        load(tmp_path, False)._tensors(given)


def contract_tensor(made, name):
    """The model has a copy of the contract of its own."""
    return next(tensor for tensor in made if tensor.name == name)
