"""Shapes read from published config.json files."""

import pytest

from llmops.build.model.architecture import Architecture, SlidingWindow
from llmops.errors import CheckpointError
from tests.plan import published_shapes

LLAMA_70B = published_shapes.LLAMA31_70B_CONFIG
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip


def test_llama():
    model = Architecture.from_hf_config(LLAMA_70B)
    assert (model.family, model.num_layers, model.num_kv_heads, model.head_dim) == ("llama", 80, 8, 128)
    assert not model.tie_word_embeddings
    assert model.moe is None
    assert model.sliding_window is None
    assert model.targets == {"openvino", "tensorrt", "pytorch"}


def test_gemma3_takes_its_text_model_and_its_family_defaults():
    model = Architecture.from_hf_config(GEMMA3_4B)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size) == (8, 4, 256, 262208)
    assert model.tie_word_embeddings
    assert model.sliding_window == SlidingWindow(1024, tuple(i for i in range(34) if i % 6 != 5))


def test_deepseek_keeps_its_first_layers_dense():
    model = published_shapes.DEEPSEEK_V3
    assert model.moe is not None
    assert (model.moe.layers, model.moe.num_shared_experts) == (tuple(range(3, 61)), 1)
    assert model.mla is not None
    assert (model.mla.kv_lora_rank, model.quant_method, model.targets) == (512, "fp8", {"pytorch"})


def test_gpt_oss_alternates_windows():
    model = published_shapes.GPT_OSS_20B
    assert model.sliding_window == SlidingWindow(128, tuple(range(0, 24, 2)))
    assert model.output_bias
    assert model.attention_sinks


@pytest.mark.parametrize("asked", [{}, {"use_sliding_window": False}])
def test_qwen2_has_bias_on_qkv_only_and_no_window_unless_asked(asked):
    config = {**LLAMA_70B, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, **asked}
    model = Architecture.from_hf_config(config)
    assert model.qkv_bias
    assert not model.output_bias
    assert model.sliding_window is None


def test_unsupported_architecture_names_the_supported_and_the_nearest():
    said = r"LlamaForCausalLMX is not supported \(nearest: LlamaForCausalLM\).*Mixtral"
    with pytest.raises(CheckpointError, match=said):
        Architecture.from_hf_config({**LLAMA_70B, "architectures": ["LlamaForCausalLMX"]})


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(name: str):
    config = {key: value for key, value in LLAMA_70B.items() if key != name}
    with pytest.raises(CheckpointError, match=f"no `{name}`"):
        Architecture.from_hf_config(config)


@pytest.mark.parametrize("value", [0, -1, "8192", True, 3.5])
def test_a_senseless_field_is_refused(value: object):
    with pytest.raises(CheckpointError, match="`hidden_size`"):
        Architecture.from_hf_config({**LLAMA_70B, "hidden_size": value})


def test_heads_must_share_kv_heads_evenly():
    with pytest.raises(CheckpointError, match="64 attention heads for 7 KV heads"):
        Architecture.from_hf_config({**LLAMA_70B, "num_key_value_heads": 7})


def test_no_architectures_list():
    with pytest.raises(CheckpointError, match="`architectures`"):
        Architecture.from_hf_config({"hidden_size": 1})
