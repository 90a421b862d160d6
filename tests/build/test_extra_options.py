"""`build --extra-llm-api-options FILE` and `--set llm.KEY=VALUE`: upstream's option files, checked before any work."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from llmops.cli.main import cli
from llmops.errors import LlmopsError

# as NVIDIA/TensorRT-LLM examples/configs/curated/deepseek-r1-throughput.yaml, without what trtllm-serve itself takes
UPSTREAM = """
max_batch_size: 64
max_num_tokens: 3200
tensor_parallel_size: 2
enable_attention_dp: false
cuda_graph_config:
  enable_padding: true
  max_batch_size: 64
  batch_sizes: null
kv_cache_config:
  dtype: fp8
  free_gpu_memory_fraction: 0.8
speculative_config:
  decoding_type: NGram
  max_draft_len: 4
stream_interval: 10
"""


@pytest.fixture
def checkpoint(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def dry_run(checkpoint, *words):
    """(the arguments of the LLM API, or None; the error's message)."""
    line = ["build", str(checkpoint), "-o", str(checkpoint.parent / "e"), "--target", "pytorch", "--dry-run", *words]
    result = CliRunner().invoke(cli, line)
    if result.exception is not None:
        assert isinstance(result.exception, LlmopsError), result.output
        return None, result.exception.message
    return result.output, ""


def test_a_file_of_upstream_sets_flags_and_fields(checkpoint, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(UPSTREAM)
    text, error = dry_run(checkpoint, "--extra-llm-api-options", str(file))
    assert error == ""
    assert "KV cache fp8, tp 2, pp 1" in text
    arguments = json.loads("{" + text[text.index("**{") + 3 :].rsplit("})", 1)[0] + "}")
    assert (arguments["tensor_parallel_size"], arguments["max_batch_size"]) == (2, 64)
    assert arguments["kv_cache_config"]["dtype"] == "fp8"
    assert arguments["kv_cache_config"]["free_gpu_memory_fraction"] == 0.8
    assert arguments["kv_cache_config"]["enable_block_reuse"] is True  # what the file does not name stays
    assert arguments["speculative_config"] == {"decoding_type": "NGram", "max_draft_len": 4}
    assert arguments["stream_interval"] == 10


def test_the_command_line_wins(checkpoint, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(UPSTREAM)
    words = ("--extra-llm-api-options", str(file), "--tp", "4", "--set", "llm.stream_interval=1")
    text, _ = dry_run(checkpoint, *words)
    assert "tp 4, pp 1" in text
    assert '"stream_interval": 1' in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "kv_cache_config:\n  free_gpu_memory_fractoin: 0.8\n",
            "did you mean kv_cache_config.free_gpu_memory_fraction",
        ),
        ("enable_chunked_prefil: true\n", "did you mean enable_chunked_prefill?"),
        ("stream_interval: ten\n", "stream_interval is 'ten'; the LLM API wants int."),
        ("- a\n- b\n", "holds no options; write one `name: value` per line"),
        ("a: [\n", "is not valid YAML"),
        ("model: /elsewhere\n", "--set llm.model: the engine folder decides that; leave it out."),
        ("max_stats_len: 5\n", "1.2 has no field max_stats_len"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(checkpoint, tmp_path, content, says):
    file = tmp_path / "options.yaml"
    file.write_text(content)
    assert says in dry_run(checkpoint, "--extra-llm-api-options", str(file))[1]


def test_a_missing_file_and_another_target(checkpoint, tmp_path):
    assert "cannot be read" in dry_run(checkpoint, "--extra-llm-api-options", str(tmp_path / "none.yaml"))[1]
    file = tmp_path / "options.yaml"
    file.write_text("stream_interval: 2\n")
    line = ["build", str(checkpoint), "-o", str(tmp_path / "e"), "--target", "tensorrt", "--dry-run"]
    result = CliRunner().invoke(cli, [*line, "--extra-llm-api-options", str(file)])
    assert "llm.stream_interval" in result.exception.message


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("llm.tensor_parallel_size=4", "give --tp 4 instead"),
        ("llm.max_batch_size=9", "give --max-batch-size 9 instead"),
        ("llm.kv_cache_config.dtype=fp8", "give --kv-cache fp8 instead"),
    ],
)
def test_a_setting_does_not_contradict_a_flag(checkpoint, setting, instead):
    assert instead in dry_run(checkpoint, "--set", setting)[1]
