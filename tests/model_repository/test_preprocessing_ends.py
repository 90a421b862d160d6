"""Tests of the places in which the tokenizer model puts a model's further ends of text.

They differ between NVIDIA's backend and models of ours.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from llmops_engine.tensor_parser import word_list
from tokenizers import Tokenizer, models

from llmops import contract
from tests.support.model_code import version_folder


def load(folder: Path, ours: bool):
    """The model as Triton initialises it, with `end_ids` 2, 8 and 9."""
    model = runpy.run_path(str(version_folder("preprocessing") / "model.py"))
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    parameters = {"tokenizer_dir": str(folder), "add_special_tokens": "true", "end_ids": "[2, 8, 9]", "pad_id": "2",
                  "vocab_size": "10"}  # fmt: skip
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


def contract_tensor(made, name):
    """The model has a copy of the contract of its own."""
    return next(tensor for tensor in made if tensor.name == name)
