"""Checkpoints as others publish them, quantised: passed on or refused in one sentence, and `llmops eval` of those that
can be read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import FP8, compressed, edit_config


def as_fp8(weight):
    blocks = weight.reshape(len(weight) // 128, 128, -1, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    values = (blocks / scale).to(torch.float8_e4m3fn).reshape(weight.shape)
    return {"weight": values, "weight_scale_inv": scale[:, 0, :, 0]}


def as_float(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FORMATS = {
    "fp8": (FP8, as_fp8),
    "float": (compressed("float-quantized", CHANNEL, TOKEN), as_float),
    # refused by their descriptions alone
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 32}, as_float),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}, as_float),
    "packed": (compressed("pack-quantized", {"num_bits": 4, "type": "int"}), as_float),
}
FITTED = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
          "fitted": True}  # fmt: skip


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    from llmops.build.quality import reference_answers

    texts = reference_answers.bundled_texts
    monkeypatch.setattr(reference_answers, "bundled_texts", lambda name: [text[:150] for text in texts(name)][:4])


@pytest.fixture
def published(checkpoint, tmp_path):
    """`published(format)`: (a checkpoint as such formats are published, its full-precision source)."""

    def make(form):
        quantised, store = FORMATS[form]
        source = checkpoint("llama", **FITTED)
        folder = tmp_path / form
        shutil.copytree(source.path, folder)
        tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            module, _, last = name.rpartition(".")
            stored = store(tensor) if module.endswith("_proj") else {last: tensor}
            tensors |= {f"{module}.{part}": value.contiguous() for part, value in stored.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        edit_config(folder, quantization_config=quantised)
        return folder, source.path

    return make


def run(*words):
    from click.testing import CliRunner

    from llmops.cli.main import cli

    result = CliRunner().invoke(cli, list(map(str, words)))
    return result, result.exception.message if hasattr(result.exception, "message") else None


# rounding moves a weight by 3% (E4M3, 3 bits of mantissa)
@pytest.mark.parametrize("form", ["fp8", "float"])
def test_eval_of_a_published_checkpoint(published, tmp_path, form):
    folder, source = published(form)
    engine = tmp_path / "engine"
    made = run("build", folder, "-o", engine, "--target", "pytorch", "--set", "image=trtllm-1.3")
    assert made[1] is None, made[0].output
    result, error = run("eval", engine, "--against", source, "--json")
    assert error is None
    figures = json.loads(result.stdout)
    assert 0.02 < figures["weight_error"] < 0.04
    assert 0.9 < figures["perplexity_ratio"] < 1.1
    assert 0 < figures["mean_kl"] < 0.3
    assert figures["top1_agreement"] > 0.7
    assert figures["passed"] is True
    result, error = run("eval", engine, "--against", source, "--json", "--max-mean-kl", "1e-9")
    assert "mean KL" in error
    figures = json.loads(result.stdout)
    assert (figures["limits"]["max_mean_kl"], figures["passed"]) == (1e-9, False)


def test_an_engine_that_passes_block_fp8_on(published, tmp_path):
    folder, source = published("fp8")
    engine = tmp_path / "engine"
    result, error = run("build", folder, "-o", engine, "--target", "pytorch")
    assert error is None, result.output
    built = load_file(engine / "model" / "model.safetensors")
    assert all(torch.equal(t.float(), built[n].float()) for n, t in load_file(folder / "model.safetensors").items())
    assert "has no quality metrics" in run("eval", engine)[1]
    result, error = run("eval", engine, "--against", source)
    assert error is None
    assert "furthest weight" in result.stdout
    # a fault in one block of one layer
    built["model.layers.1.mlp.down_proj.weight_scale_inv"] *= 1.2
    save_file(built, engine / "model" / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.down_proj.weight differs by 20%" in run("eval", engine, "--against", source)[1]


@pytest.mark.parametrize(
    ("form", "change", "target", "says"),
    [
        ("fp8", {"weight_block_size": None}, "pytorch", "(fp8), with one scale per tensor, where TensorRT-LLM's "
         "PyTorch backend supports only blocks of 128 x 128; give the full-precision checkpoint with --quant fp8."),
        ("fp8", {"weight_block_size": [64, 64]}, "pytorch", "in blocks of 64 x 64"),
        ("fp8", {"weight_block_size": {"a": 1}}, "pytorch", "with one scale per tensor"),
        ("fp8", {}, "tensorrt", "(fp8), which --target tensorrt cannot take; give the full-precision checkpoint with "
         "--quant fp8."),
        ("awq", {}, "pytorch", "(awq), which TensorRT-LLM's PyTorch backend does not load; give the full-precision "
         "checkpoint with --quant int4_awq."),
        ("gptq", {}, "pytorch", "(gptq), which TensorRT-LLM's PyTorch backend does not load"),
        ("packed", {}, "pytorch", "(compressed-tensors), which TensorRT-LLM's PyTorch backend does not load; give the "
         "full-precision checkpoint with --quant int4_awq."),
        ("float", {}, "pytorch", "full-precision checkpoint with --quant fp8."),
        ("awq", {}, "openvino", "is already quantised (awq)"),
        ("fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}, "pytorch", "(modelopt FP8), but TensorRT-LLM 1.2 "
         "reads the format from hf_quant_config.json, which is missing"),
    ],
)  # fmt: skip
def test_refused_in_one_sentence(published, tmp_path, form, change, target, says):
    folder, _ = published(form)
    edit_config(folder, quantization_config=FORMATS[form][0] | change)
    for more in ([], ["--dry-run"]):
        result, error = run("build", folder, "-o", tmp_path / "engine", "--target", target, *more)
        assert error is not None, result.output
        assert says in error
        assert error.startswith(f"{folder} is already quantised")
    assert not (tmp_path / "engine").exists()


BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}


@pytest.mark.parametrize(
    ("weights", "inputs", "says"),
    [
        (CHANNEL, TOKEN, None),
        (BLOCK, GROUP, None),
        ({**CHANNEL, "strategy": "tensor"}, TOKEN, "which TensorRT-LLM's PyTorch backend does not load"),
        (CHANNEL, None, "which TensorRT-LLM's PyTorch backend does not load"),
        (BLOCK, {**GROUP, "group_size": 64}, "which TensorRT-LLM's PyTorch backend does not load"),
    ],
)
def test_fp8_of_llm_compressor_is_served_as_it_is_from_1_3_on(published, tmp_path, weights, inputs, says):
    folder, _ = published("float")
    description = compressed("float-quantized", weights, inputs) | {"ignore": ["lm_head"]}
    edit_config(folder, quantization_config=description)
    words = ("build", folder, "-o", tmp_path / "engine", "--target", "pytorch", "--dry-run")
    error = run(*words, "--set", "image=trtllm-1.3")[1]
    assert says in error if says else error is None
    older = run(*words)[1]
    assert older is not None
    assert ("use --set image=trtllm-1.3, or give the full-precision checkpoint" in older) == (says is None)


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_modelopts_newer_descriptions_are_served_as_they_are_from_1_3_on(published, tmp_path, place):
    folder, _ = published("fp8")
    config = json.loads((folder / "config.json").read_text())
    described = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": []}
    if place == "config.json":
        config["quantization_config"] = described
    else:
        del config["quantization_config"]
        (folder / place).write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps(config))
    words = ("build", folder, "-o", tmp_path / "engine", "--target", "pytorch", "--dry-run")
    assert "(modelopt FP8), " in run(*words)[1]
    assert run(*words, "--set", "image=trtllm-1.3")[1] is None


def test_modelopt_checkpoints(export, checkpoint, tmp_path):
    _, folder, source = export("llama", "fp8", target="pytorch", **FITTED)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source.path / name, folder)
    engine = tmp_path / "engine"
    assert run("build", folder, "-o", engine, "--target", "pytorch")[1] is None
    result, error = run("eval", engine, "--against", source.path, "--json")
    assert error is None
    assert 0.02 < json.loads(result.stdout)["weight_error"] < 0.04
    assert "leave out --quant fp8" in run("build", folder, "-o", engine, "--target", "pytorch", "--quant", "fp8")[1]
    assert f"--against {folder} is itself quantised (modelopt)" in run("eval", engine, "--against", folder)[1]
    path = folder / "hf_quant_config.json"
    path.write_text(path.read_text().replace('"FP8"', '"NVFP4"'))
    says = "(modelopt NVFP4), which needs a Blackwell GPU, not --gpu h100-sxm"
    assert says in run("build", folder, "-o", engine, "--target", "pytorch", "--gpu", "h100-sxm")[1]
