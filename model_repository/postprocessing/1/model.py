"""The Triton model NAME-postprocessing, which turns token ids into text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import llmops_contract as contract
import numpy as np
import triton_python_backend_utils as pb_utils
from llmops_postprocessing.detokenize import text_delta
from tokenizers import Tokenizer

_TOKENS, _LENGTH = contract.POST_TOKENS.name, contract.POST_LENGTH.name
_CONTEXT_IDS, _FINISHED = contract.POST_CONTEXT_IDS.name, contract.POST_FINISHED.name
_OUTPUT = contract.POST_OUTPUT.name


class TritonPythonModel:
    """The detokenizer of one served name, from TOKENS_BATCH [1, beams, n] to OUTPUT [1, beams].

    CONTEXT_IDS has the tokens before the new tokens, so that streamed chunks join into whole
    characters. Without CONTEXT_IDS each response is decoded separately.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        self._tokenizer = Tokenizer.from_file(os.path.join(parameters["tokenizer_dir"], "tokenizer.json"))
        self._skip_special_tokens = parameters["skip_special_tokens"] == "true"

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Return a response for each request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        tokens, lengths = tensors[_TOKENS], tensors[_LENGTH].reshape(-1)
        beams = tokens.reshape(lengths.size, -1)
        context = tensors.get(_CONTEXT_IDS)
        before = [[]] * lengths.size if context is None else context.reshape(lengths.size, -1).tolist()
        finished = bool(tensors[_FINISHED].reshape(-1)[0]) if _FINISHED in tensors else context is None
        texts = [
            text_delta(self._decode, earlier, beam[:length].tolist(), finished)
            for earlier, beam, length in zip(before, beams, lengths, strict=True)
        ]
        output = np.array([[text.encode() for text in texts]], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor(_OUTPUT, output)])

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return text
