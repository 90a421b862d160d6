"""Files of somebody else: whatever stands in them, a build says in one sentence what is wrong, before any work."""

import copy
import json
import math
import os
import struct
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint.gguf_header import read_header as read_gguf
from llmops.build.checkpoint.safetensors_header import read_header as read_safetensors
from llmops.build.checkpoint.safetensors_header import shard_files
from llmops.build.model.architecture import Architecture
from llmops.build.targets.openvino.rope import inverse_frequencies
from llmops.build.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llmops.errors import CheckpointError

EXAMPLES = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
TOKENS = ["<s>", "</s>", "a", "b", "ab", "c"]
METADATA: dict[str, Any] = {
    "llama.embedding_length": 32, "llama.block_count": 1, "llama.attention.head_count": 2,
    "llama.feed_forward_length": 32, "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1], "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
}  # fmt: skip


def tell(read: Callable[[], object]) -> None:
    """It is read, or refused in one sentence of a length that people read; any other exception fails the test."""
    try:
        read()
        return
    except CheckpointError as error:
        said = error.message
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 600


def write_gguf(path: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write a GGUF file with the gguf package. A value of None leaves the key out."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    for key, value in {**METADATA, **(changes or {})}.items():
        if value is not None:
            adders = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
            getattr(writer, f"add_{adders[type(value)]}")(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), 32), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def test_the_untouched_file_is_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf")))
    assert checkpoint.special_tokens.end == (1,)
    assert tokenizer_from_gguf(checkpoint.metadata).encode("abc").ids == [4, 5]


@pytest.mark.parametrize("key", sorted(METADATA))
@pytest.mark.parametrize("value", ["text", -1, 1 << 31, True, math.nan, math.inf, ["x"], [-1], [math.nan]])
def test_values_of_other_types(tmp_path: Path, key: str, value: Any) -> None:
    if isinstance(value, int) and value < 0:
        value = float(value)
    path = write_gguf(tmp_path / "tiny.gguf", {key: value})
    tell(lambda: tokenizer_from_gguf(open_checkpoint(str(path)).metadata))


@pytest.mark.parametrize("alignment", [0, 12, 33, 8192, math.nan, math.inf, -32.0, "32", [32]])
def test_alignments_that_are_none(tmp_path: Path, alignment: Any) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", {"tokenizer.alignment": alignment})
    # the gguf package obeys the real key itself, so it is written under a name of the same length
    path.write_bytes(path.read_bytes().replace(b"tokenizer.alignment", b"general.alignment\0\0"))
    longer, real = struct.pack("<Q", 19) + b"general.alignment\0\0", struct.pack("<Q", 17) + b"general.alignment"
    path.write_bytes(path.read_bytes().replace(longer, real))
    with pytest.raises(CheckpointError, match=r"general\.alignment is .* where a multiple of 8 up to 4,096 belongs"):
        read_gguf(path)


def gguf_with(value: bytes) -> bytes:
    """A header with one key whose value is `value`, type number first."""
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + value


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(gguf_with(struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000), id="arrays in arrays"),
        pytest.param(gguf_with(struct.pack("<IIQ", 9, 4, 1 << 62)), id="an endless array"),
        pytest.param(gguf_with(struct.pack("<IQ", 8, 1 << 63)), id="an endless text"),
        pytest.param(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60) + bytes(1 << 20), id="endless pairs"),
        pytest.param(struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0) + bytes(1 << 20), id="endless tensors"),
        pytest.param(
            struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<QI", 0, 1 << 31) + bytes(1 << 20), id="dimensions"
        ),
    ],
)
def test_headers_that_never_end(tmp_path: Path, raw: bytes) -> None:
    """Refused after a look, not after a walk: little memory is taken."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="damaged"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_holes_of_a_gguf(tmp_path: Path, gguf_bytes: bytes) -> None:
    """Before the fix, 3 GiB of nothing behind the tensors, or in a list that is skipped, were hashed."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes)
    os.truncate(path, 3 << 30)
    with pytest.raises(CheckpointError, match="is damaged: it has 3,221,225,472 bytes, its header and tensors"):
        read_gguf(path)
    path.write_bytes(gguf_with(struct.pack("<IIQ", 9, 0, 3 << 30)))
    os.truncate(path, (3 << 30) + path.stat().st_size)
    with pytest.raises(CheckpointError, match="bytes in its header"):
        read_gguf(path)


def test_tensors_that_share_their_bytes(tmp_path: Path, gguf_bytes: bytes) -> None:
    """The second tensor's offset (768, after 6 × 32 floats) becomes the first's."""
    path, name = tmp_path / "tiny.gguf", b"output_norm.weight"
    # the name, how many dimensions, the one, the type
    at = gguf_bytes.index(name) + len(name) + 16
    (offset,) = struct.unpack_from("<Q", gguf_bytes, at)
    assert offset == 768
    path.write_bytes(gguf_bytes[:at] + bytes(8) + gguf_bytes[at + 8 :])
    with pytest.raises(CheckpointError, match=r"(token_embd|output_norm)\.weight overlap"):
        read_gguf(path)


@EXAMPLES
@given(data=st.data())
def test_gguf_files_with_any_bytes_changed(tmp_path: Path, gguf_bytes: bytes, data: st.DataObject) -> None:
    raw = bytearray(gguf_bytes)
    end = raw.rindex(b"output_norm.weight") + 40
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 8))
        change = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8))))
        raw[at : at + len(change)] = change
    path = tmp_path / "tiny.gguf"
    path.write_bytes(raw)
    tell(lambda: tokenizer_from_gguf(open_checkpoint(str(path)).metadata))


def safetensors_file(path: Path, header: str, data: int = 64) -> Path:
    raw = header.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}


@pytest.mark.parametrize(
    "header",
    [
        pytest.param("[" * 100_000, id="deep"),
        pytest.param('{"a":' * 100_000, id="deep objects"),
        pytest.param('{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', id="1e999"),
        pytest.param('{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', id="NaN"),
        pytest.param('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}', id="offset 1e999"),
        pytest.param(json.dumps({"a": entry(shape=[-2, -2])}), id="negative"),
        pytest.param(json.dumps({"a": entry(shape=[4.0])}), id="a float"),
        pytest.param(json.dumps({"a": entry(shape=[True, 4])}), id="a truth value"),
        pytest.param(json.dumps({"a": entry(shape=["4"])}), id="a text"),
        pytest.param(json.dumps({"a": entry(shape={"4": 4})}), id="an object"),
        pytest.param(json.dumps({"a": entry(data_offsets=[16, 0])}), id="backwards"),
        pytest.param(json.dumps({"a": entry(data_offsets=[-16, 0])}), id="in the header"),
        pytest.param(json.dumps({"a": entry(), "b": entry()}), id="the same bytes twice"),
        pytest.param(json.dumps({"a": entry(), "b": entry(data_offsets=[8, 24])}), id="overlap"),
        pytest.param(json.dumps({"a": entry(dtype="?", shape=[2]), "b": entry()}), id="overlap of an unknown type"),
        pytest.param(json.dumps({"a": entry(dtype="?", shape=[2], data_offsets=[0, 64])}), id="a hole of no type"),
        pytest.param(json.dumps({"a": entry()}), id="bytes behind the last tensor"),
        pytest.param(json.dumps({"a": entry(), "b": entry(data_offsets=[48, 64])}), id="a hole between tensors"),
        pytest.param(json.dumps({"a": [1]}), id="no object"),
        pytest.param(json.dumps({"a": entry(shape=[2**62, 4, 0], data_offsets=[0, 0])}), id="no values, great sizes"),
    ],
)
def test_safetensors_headers(tmp_path: Path, header: str) -> None:
    """Each is refused by the safetensors library too."""
    from safetensors import safe_open

    path = safetensors_file(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match="damaged"):
        read_safetensors(path, path.name)
    with pytest.raises(Exception, match=r"(?i)error|invalid|header"), safe_open(path, framework="np") as file:
        file.keys()


@pytest.mark.parametrize("value", ["../secret", "/etc/passwd", "", "..", 3, None, ["x"]])
def test_an_index_that_leads_elsewhere(tmp_path: Path, value: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": value}}))
    with pytest.raises(CheckpointError, match="no `weight_map` of tensors to file names"):
        shard_files(tmp_path)


CONFIGS = [
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 256,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "sliding_window": 64, "rope_scaling": None,
        "quantization_config": {"quant_method": "awq", "bits": 4},
    },
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 256,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "head_dim": 16, "layer_types": ["full_attention"] * 2,
    },
]  # fmt: skip
NUMBERS = st.integers(-3, 3) | st.sampled_from([1 << 31, 10**12, 10**400]) | st.sampled_from([math.inf, math.nan, 1.5])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        # before the fix, a build took 5.8 GB and 25 s of CPU for the rotary frequencies of such heads
        ({"head_dim": 10**9}, 16384),
        ({"hidden_size": 2**30}, 16384),
        # before the fix, `plan` took more than a minute for 10,000 layers, and ran for hours for more next tokens
        ({"num_hidden_layers": 10_000, "layer_types": None}, 1024),
        ({"num_nextn_predict_layers": 10_000, "layer_types": None}, 1024),
    ],
)
def test_sizes_that_would_fill_the_memory_or_take_minutes(change: dict[str, Any], most: int) -> None:
    with pytest.raises(CheckpointError, match=f"at most {most} are possible"):
        Architecture.from_hf_config(CONFIGS[most == 1024] | change)


def test_as_many_layers_as_the_largest_merge() -> None:
    """RichardErkhov/FATLLAMA-1.7T-Instruct, mergekit_config.yml: five slices of 105 layers."""
    assert Architecture.from_hf_config(CONFIGS[0] | {"num_hidden_layers": 525}).num_layers == 525


def test_a_list_of_a_million_dense_layers() -> None:
    """Before the fix, each layer was looked for in the whole list: an hour for 10,000 layers."""
    begun = time.thread_time()
    dense = {"num_hidden_layers": 512, "layer_types": None, "mlp_only_layers": [-1] * 10**6}
    Architecture.from_hf_config(CONFIGS[1] | dense)
    assert time.thread_time() - begun < 1


@EXAMPLES
@given(data=st.data())
def test_configs_with_any_field_changed(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(CONFIGS)))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)):
        config[key] = data.draw(VALUES)
    tell(lambda: Architecture.from_hf_config(config))


LLAMA3_ROPE = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@EXAMPLES
@given(
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]) | VALUES,
    parameters=st.fixed_dictionaries(
        {},
        optional={
            name: NUMBERS | st.sampled_from([0, 1e-320, 1e308, "8"]) | VALUES for name in ("rope_theta", *LLAMA3_ROPE)
        },
    ),
)
@example(kind="llama3", parameters=LLAMA3_ROPE | {"low_freq_factor": 0})
@example(kind="default", parameters={"rope_theta": 1e308})
def test_rotary_embeddings_with_any_parameters(kind: Any, parameters: dict[str, Any]) -> None:
    """Before the fix, a factor of 0 was a traceback, and an infinite theta built an engine that ignores positions."""

    def frequencies() -> None:
        found = inverse_frequencies({"rope_scaling": {"rope_type": kind, **parameters}}, 8)
        assert np.isfinite(found).all()
        assert (found > 0).all()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell(frequencies)
