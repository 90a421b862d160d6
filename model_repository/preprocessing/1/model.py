"""NAME-preprocessing: text to token ids. TensorRT-LLM's tensor names; the Rust tokenizer only, no framework."""

from __future__ import annotations

import json
import os

import llmops_contract as contract
import numpy as np
import triton_python_backend_utils as pb_utils
from llmops_preprocessing.word_lists import embedding_bias, encode_word_list, word_ids
from tokenizers import Tokenizer

# what clients of the ensemble call its inputs
_PUBLIC = {tensor: name for name, tensor in contract.ENSEMBLE_TO_PREPROCESSING.items()}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config["parameters"].items()}
        # engine models of this project withhold every end until min_tokens, NVIDIA's backend end_id alone
        self._ours = any(output["name"] == contract.PRE_OUT_RETURN_CONTEXT.name for output in config["output"])
        self._tokenizer = Tokenizer.from_file(os.path.join(parameters["tokenizer_dir"], "tokenizer.json"))
        # a checkpoint's tokenizer.json may cut or pad; here the engine decides what is too long
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_special_tokens = parameters["add_special_tokens"] == "true"
        self._end_ids = json.loads(parameters["end_ids"])
        self._pad_id = int(parameters["pad_id"])
        self._vocab_size = int(parameters["vocab_size"])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            outputs = self._tensors({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(tensor.name, value) for tensor, value in outputs.items()])

    def _tensors(self, given: dict[str, np.ndarray]) -> dict[contract.Tensor, np.ndarray]:
        if given[contract.PRE_QUERY.name].size != 1:
            raise ValueError(f"{contract.TEXT_INPUT}: one text per request, got {given[contract.PRE_QUERY.name].size}")
        text = _strings(given, contract.PRE_QUERY)[0]
        ids = self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens).ids
        stop_words = word_ids(self._tokenizer, _strings(given, contract.PRE_STOP_WORDS))
        bad_words = word_ids(self._tokenizer, _strings(given, contract.PRE_BAD_WORDS))
        end_id = given.get(contract.PRE_END_ID.name)
        if end_id is None:
            # `end_id` takes one token; a model with several ends gets the others as stop words
            others = [[token] for token in self._end_ids[1:]]
            least = given.get(contract.PRE_MIN_TOKENS.name)
            if not self._ours and least is not None and least.any():
                bad_words += others
            else:
                stop_words += others
        weights = given.get(contract.PRE_BIAS_WEIGHTS.name)
        bias = embedding_bias(
            self._tokenizer,
            _strings(given, contract.PRE_BIAS_WORDS),
            [] if weights is None else weights.reshape(-1).tolist(),
            self._vocab_size,
        )
        return {
            contract.PRE_OUT_IDS: np.array([ids], dtype=np.int32).reshape(1, -1),
            contract.PRE_OUT_LENGTH: _one(len(ids)),
            contract.PRE_OUT_BAD_WORDS: encode_word_list(bad_words),
            contract.PRE_OUT_STOP_WORDS: encode_word_list(stop_words),
            contract.PRE_OUT_BIAS: bias,
            contract.PRE_OUT_OUTPUT_LEN: given[contract.PRE_REQUEST_OUTPUT_LEN.name].reshape(1, -1),
            contract.PRE_OUT_END_ID: _one(self._end_ids[0]) if end_id is None else end_id.reshape(1, 1),
            contract.PRE_OUT_PAD_ID: given.get(contract.PRE_PAD_ID.name, _one(self._pad_id)).reshape(1, 1),
            contract.PRE_OUT_RETURN_CONTEXT: np.array([[True]]),
        }


def _strings(given: dict[str, np.ndarray], tensor: contract.Tensor) -> list[str]:
    values = given.get(tensor.name)
    if values is None:
        return []
    try:
        return [value.decode() if isinstance(value, bytes) else str(value) for value in values.reshape(-1)]
    except UnicodeDecodeError:
        raise ValueError(f"{_PUBLIC[tensor]}: not valid UTF-8") from None


def _one(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.int32)
