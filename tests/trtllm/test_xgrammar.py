"""The tokenizer file of guided decoding, held to what NVIDIA's script writes through transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmops.build.trtllm.backend_files import tokenizer_info


def nvidias(folder: Path) -> dict:
    """NVIDIA/TensorRT-LLM examples/generate_xgrammar_tokenizer_info.py, in its own words: get_vocab() in the order of
    ids, the fast tokenizer's serialisation, the end-of-text token."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        "encoded_vocab": sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get),
        "tokenizer_str": tokenizer.backend_tokenizer.to_str(),
        "stop_token_ids": [tokenizer.eos_token_id],
    }


def test_it_is_what_nvidias_script_writes(engine_dir: Path) -> None:
    folder = engine_dir / "tokenizer"
    mine, theirs = tokenizer_info(folder / "tokenizer.json", [2]), nvidias(folder)
    assert set(mine) == set(theirs)
    assert mine["encoded_vocab"] == theirs["encoded_vocab"]
    assert mine["stop_token_ids"] == theirs["stop_token_ids"]
    # transformers fills in what tokenizer_config.json says of truncation and added tokens; the model is the same
    assert json.loads(mine["tokenizer_str"])["model"] == json.loads(theirs["tokenizer_str"])["model"]
    assert json.loads(mine["tokenizer_str"])["decoder"] == json.loads(theirs["tokenizer_str"])["decoder"]


def test_a_vocabulary_with_a_gap_keeps_its_ids(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "c": 2}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_info(tmp_path / "tokenizer.json", [0])["encoded_vocab"] == ["a", "", "c"]
