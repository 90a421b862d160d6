"""`llmops build --dry-run`: config.json is enough, and the machine at hand need not be the one that builds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmops.build.targets.nvidia import stage_estimates
from llmops.cli.main import cli
from llmops.errors import InputError

# Llama 3.3 70B Instruct; its safetensors index counts 70,553,706,496 parameters
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def dry_run(checkpoint: Path, *words: str) -> str:
    pytest.importorskip("modelopt")
    output = str(checkpoint / "engine")
    result = CliRunner().invoke(cli, ["build", str(checkpoint), "-o", output, "--dry-run", "--tp", "8", *words])
    assert result.exit_code == 0, result.output
    assert not (checkpoint / "engine").exists()
    return result.output


def test_a_70b_engine_is_planned_on_a_laptop(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_estimates, "available_memory", lambda: 16 << 30)
    text = dry_run(checkpoint, "--target", "tensorrt", "--quant", "fp8", "--kv-cache", "fp8", "--gpu", "h100-sxm")
    assert "70.55 billion parameters" in text
    assert re.search(
        r"not on this machine: The stage 'quantise and export' needs about \d+\.\d GiB of memory, 16.0", text
    )
    rows = {line[:28].strip(): line[28:].split() for line in text.splitlines() if "GiB" in line and line[:1] != "n"}
    assert list(rows)[-4:] == ["quantise and export", "quality gate", "trtllm-build, 8 ranks", "serving, weights only"]
    # 1 byte per weight of the layers, 2 per value of the embedding and the output matrix
    expected = (70_553_706_496 - 2 * 128256 * 8192 + 4 * 128256 * 8192) / 2**30
    assert float(rows["serving, weights only"][2]) == pytest.approx(expected, abs=0.1)
    assert "--user_buffer enable" in text
    assert "inside nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in text


def test_a_tied_output_matrix_is_stored_twice_in_an_engine(checkpoint: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    (checkpoint / "config.json").write_text(json.dumps(tied))
    sizes = []
    for target in ("tensorrt", "pytorch"):
        text = dry_run(checkpoint, "--target", target, "--quant", "fp8", "--gpu", "h100-sxm")
        sizes.append(float(re.search(r"^serving, weights only.* ([\d.]+) GiB +[\d.]+ GiB$", text, re.M)[1]))
    assert sizes[0] - sizes[1] == pytest.approx(2 * 128256 * 8192 / 2**30, abs=0.1)


def test_the_llm_api_arguments_are_printed(checkpoint: Path) -> None:
    text = dry_run(checkpoint, "--target", "pytorch", "--quant", "int4_awq")
    arguments = json.loads(text[text.index("**{") + 2 : text.rindex("}") + 1])
    assert (arguments["tensor_parallel_size"], arguments["guided_decoding_backend"]) == (8, "xgrammar")


def refused(checkpoint: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, ["build", str(checkpoint), "-o", str(checkpoint / "e"), "--dry-run", *words])
    assert isinstance(result.exception, InputError), result.output
    return result.exception.message


def test_gpus_that_cannot_run_or_hold_it(checkpoint: Path) -> None:
    words = ("--target", "tensorrt", "--quant")
    assert refused(checkpoint, *words, "fp8", "--gpu", "h1000").startswith("The GPU 'h1000' is unknown")
    assert refused(checkpoint, *words, "fp8", "--gpu", "a100-sxm", "--tp", "8") == (
        "--gpu a100-sxm has no FP8 arithmetic, which fp8 weights need; use a newer GPU, or --quant none, int4_awq, "
        "int8_sq, int8_wo, int4_wo."
    )
    for words_of in (("int4_awq",), ("fp8", "--kv-cache", "int8")):
        assert refused(checkpoint, *words, *words_of, "--gpu", "b200-sxm", "--tp", "8").startswith(
            "--gpu b200-sxm: trtllm-build makes engines of none and fp8 weights there, with --kv-cache auto or fp8"
        )
    # 141.1 GB in bfloat16 and 81,559 MiB each
    assert refused(checkpoint, *words, "none", "--gpu", "h100-sxm") == (
        "The weights take 131 GiB, and 1 x h100-sxm have 80 GiB; raise --tp or --pp, name a larger --gpu, or choose a "
        "--quant of fewer bits."
    )


# openai/gpt-oss-120b; its safetensors files hold 65,248,815,744 bytes
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "num_local_experts": 128, "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def test_a_quantised_checkpoint_is_planned_as_it_is_stored(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps(GPT_OSS))
    text = dry_run(checkpoint, "--target", "pytorch", "--gpu", "h100-sxm")
    row = next(line for line in text.splitlines() if line.startswith("serving"))
    assert float(row[28:].split()[0]) == pytest.approx(65_248_815_744 / 2**30, rel=0.01)
