"""The Triton model NAME-preprocessing, which turns text into token ids."""

from __future__ import annotations

import json
import os

import llmops_contract as contract
import numpy as np
import triton_python_backend_utils as pb_utils
from llmops_preprocessing.word_lists import embedding_bias, encode_word_list, word_ids
from tokenizers import Tokenizer

# the names under which the ensemble's clients know the inputs, for error messages
_PUBLIC = {tensor: name for name, tensor in contract.ENSEMBLE_TO_PREPROCESSING.items()}


class TritonPythonModel:
    """The tokenizer of one served name, with the library `tokenizers` only."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config["parameters"].items()}
        # our engine models withhold every end token until min_tokens, NVIDIA's backend only end_id
        self._ours = any(output["name"] == contract.PRE_OUT_RETURN_CONTEXT.name for output in config["output"])
        self._tokenizer = Tokenizer.from_file(os.path.join(parameters["tokenizer_dir"], "tokenizer.json"))
        # a checkpoint's tokenizer.json may switch on truncation or padding, but the engine must see
        # the whole prompt to reject one that is too long
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_special_tokens = parameters["add_special_tokens"] == "true"
        self._end_ids = json.loads(parameters["end_ids"])
        self._pad_id = int(parameters["pad_id"])
        self._vocab_size = int(parameters["vocab_size"])
        self._takes_bias = parameters["logit_bias"] == "true"

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Return a response for each request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            outputs = self._tensors({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(tensor.name, value) for tensor, value in outputs.items()])

    def _tensors(self, tensors: dict[str, np.ndarray]) -> dict[contract.Tensor, np.ndarray]:
        if tensors[contract.PRE_QUERY.name].size != 1:
            raise ValueError(
                f"{contract.TEXT_INPUT}: one text per request, got {tensors[contract.PRE_QUERY.name].size}"
            )
        text = _strings(tensors, contract.PRE_QUERY)[0]
        ids = self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens).ids
        stop_words = word_ids(self._tokenizer, _strings(tensors, contract.PRE_STOP_WORDS))
        bad_words = word_ids(self._tokenizer, _strings(tensors, contract.PRE_BAD_WORDS))
        end_id = tensors.get(contract.PRE_END_ID.name)
        if end_id is None:
            # `end_id` holds one token, so the model's other end tokens become stop words
            others = [[token] for token in self._end_ids[1:]]
            min_tokens = tensors.get(contract.PRE_MIN_TOKENS.name)
            if not self._ours and min_tokens is not None and min_tokens.any():
                bad_words += others
            else:
                stop_words += others
        weights = tensors.get(contract.PRE_BIAS_WEIGHTS.name)
        if weights is not None and weights.any() and not self._takes_bias:
            # reject the bias here, because NVIDIA's backend would end all requests
            raise ValueError(f"{contract.BIAS_WORDS}: not supported by this engine")
        bias = embedding_bias(
            self._tokenizer,
            _strings(tensors, contract.PRE_BIAS_WORDS),
            [] if weights is None else weights.reshape(-1).tolist(),
            self._vocab_size,
        )
        return {
            contract.PRE_OUT_IDS: np.array([ids], dtype=np.int32).reshape(1, -1),
            contract.PRE_OUT_LENGTH: _one(len(ids)),
            contract.PRE_OUT_BAD_WORDS: encode_word_list(bad_words),
            contract.PRE_OUT_STOP_WORDS: encode_word_list(stop_words),
            contract.PRE_OUT_BIAS: bias,
            contract.PRE_OUT_OUTPUT_LEN: tensors[contract.PRE_REQUEST_OUTPUT_LEN.name].reshape(1, -1),
            contract.PRE_OUT_END_ID: _one(self._end_ids[0]) if end_id is None else end_id.reshape(1, 1),
            contract.PRE_OUT_PAD_ID: tensors.get(contract.PRE_PAD_ID.name, _one(self._pad_id)).reshape(1, 1),
            contract.PRE_OUT_RETURN_CONTEXT: np.array([[True]]),
        }


def _strings(tensors: dict[str, np.ndarray], tensor: contract.Tensor) -> list[str]:
    values = tensors.get(tensor.name)
    if values is None:
        return []
    try:
        return [value.decode() if isinstance(value, bytes) else str(value) for value in values.reshape(-1)]
    except UnicodeDecodeError:
        raise ValueError(f"{_PUBLIC[tensor]}: not valid UTF-8") from None


def _one(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.int32)
