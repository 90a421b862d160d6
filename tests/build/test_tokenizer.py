"""Tokenizers rebuilt from GGUF metadata encode as the original does."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import SentencePieceBPETokenizer, Tokenizer

from llmops.build.checkpoint import open_checkpoint
from llmops.build.targets.openvino.detokenizer import vocabulary_bytes
from llmops.build.tokenizer import write_tokenizer
from llmops.build.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llmops.errors import CheckpointError

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def smollm2_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "tokenizer"
    write_tokenizer(open_checkpoint(str(smollm2)), folder, pytest.fail)
    return folder


def test_smollm2_encodes_as_llama_cpp_does(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    cases = json.loads((DATA / "smollm2_tokens.json").read_text())["texts"]
    assert len(cases) > 20
    for case in cases:
        encoded = tokenizer.encode(case["text"])
        assert encoded.ids == case["ids"], case["text"]
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == case["text"]


def test_every_token_decodes_to_the_bytes_that_grammars_see(smollm2_folder: Path) -> None:
    path = smollm2_folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    vocabulary, special = vocabulary_bytes(path, 49152)
    assert special == list(range(17))
    for text in ("Grüße 日本 🎉", 'x = {"a": [1, 2]}\n'):
        assert b"".join(vocabulary[i] for i in tokenizer.encode(text).ids) == text.encode()


@pytest.fixture(scope="module")
def sentencepiece() -> tuple[Tokenizer, Tokenizer]:
    """A trained SentencePiece BPE, and the same one rebuilt from the tokens and scores that a GGUF would hold."""
    original = SentencePieceBPETokenizer(add_prefix_space=True)
    corpus = ["the cat sat on the mat", "a dog and a cat ran", "sitting on the dotted line"] * 10
    original.train_from_iterator(corpus, vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [tuple(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    rank = {left + right: -float(index) for index, (left, right) in reversed(list(enumerate(merges)))}
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [rank.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3), "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    return Tokenizer.from_str(original.to_str()), tokenizer_from_gguf(metadata)


@settings(max_examples=200)
@given(st.lists(st.text(alphabet="acdeghilmnorst", min_size=1, max_size=9), min_size=1, max_size=6))
def test_sentencepiece_from_scores(sentencepiece: tuple[Tokenizer, Tokenizer], words: list[str]) -> None:
    original, rebuilt = sentencepiece
    text = " ".join(words)
    assert rebuilt.encode(text, add_special_tokens=False).tokens == original.encode(text).tokens
    assert rebuilt.decode(rebuilt.encode(text).ids) == text
    assert rebuilt.encode(text).ids[0] == 1  # SentencePiece models start with bos unless the file says otherwise


def write(folder: Path, tmp_path: Path) -> list[str]:
    warnings: list[str] = []
    write_tokenizer(open_checkpoint(str(folder)), tmp_path / "out", warnings.append)
    return warnings


def test_a_missing_tokenizer_is_refused(copy_of_tiny: Path, tmp_path: Path) -> None:
    (copy_of_tiny / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer; copy tokenizer\.json to it"):
        write(copy_of_tiny, tmp_path)


def test_a_corrupt_tokenizer_is_refused(copy_of_tiny: Path, tmp_path: Path) -> None:
    (copy_of_tiny / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(CheckpointError, match=r"The tokenizer of .* is damaged"):
        write(copy_of_tiny, tmp_path)


def test_added_tokens_without_an_embedding_are_dropped(copy_of_tiny: Path, tmp_path: Path) -> None:
    path = copy_of_tiny / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([f"<image_{n}>" for n in range(50)])
    tokenizer.save(str(path))
    assert tokenizer.token_to_id("<image_49>") >= 320
    warnings = write(copy_of_tiny, tmp_path)
    kept = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert max(kept.get_vocab().values()) < 320
    assert re.match(r"Dropped (<image_\d+>, ){4}<image_\d+> and \d+ more from the tokenizer, because", warnings[0])
    assert kept.token_to_id("<image_0>") is not None


@pytest.mark.parametrize(
    ("stored", "written"),
    [
        # 4.57.3: "Tokenizer class TokenizersBackend does not exist", and "'list' object has no attribute 'keys'"
        ({"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]},
         {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"]}),
        # without a class AutoTokenizer looks for a config.json, which is not beside an engine's tokenizer
        ({}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {}}, None),
        # both: "does not appear to have a file named tokenization_x.py"
        ({"tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}},
         {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
)  # fmt: skip
def test_transformers_4_and_5_can_read_what_either_wrote(copy_of_tiny, tmp_path, stored, written):
    (copy_of_tiny / "tokenizer_config.json").write_text(json.dumps(stored))
    assert write(copy_of_tiny, tmp_path) == []
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == (stored if written is None else written)


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_transformers_5_takes_a_byte_level_tokenizer_as_it_is(copy_of_tiny: Path, tmp_path: Path, name: str) -> None:
    """5.5.4 makes a LlamaTokenizerFast SentencePiece's, as whose texts xgrammar 0.1.32 reads `ĠYork`.

    It allowed no token after `New` in "New York", and a line break in a JSON string.
    """
    transformers = pytest.importorskip("transformers")
    (copy_of_tiny / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    write(copy_of_tiny, tmp_path)
    # as TensorRT-LLM's tokenizer_factory calls it
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", legacy=False, use_fast=True)
    written = json.loads((tmp_path / "out/tokenizer.json").read_text())
    for part in ("model", "pre_tokenizer", "decoder"):
        assert json.loads(loaded.backend_tokenizer.to_str())[part] == written[part]


def test_calibration_reads_the_ids_of_tokenizer_json(copy_of_tiny: Path) -> None:
    """transformers 5.5.4 builds another tokenizer from the files of DeepSeek's distilled Llamas."""
    pytest.importorskip("transformers")
    from llmops.build.quantize.model_loading import load_tokenizer

    (copy_of_tiny / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    text = "the cat sat\non the mat"
    ids = Tokenizer.from_file(str(copy_of_tiny / "tokenizer.json")).encode(text).ids
    assert load_tokenizer(open_checkpoint(str(copy_of_tiny))).encode(text) == ids
