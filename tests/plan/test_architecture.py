"""Shapes read from published config.json files."""

from __future__ import annotations

import pytest

from llmops.build.model.architecture import Architecture, SlidingWindow
from llmops.errors import CheckpointError

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8"},
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
}


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
    model = Architecture.from_hf_config(DEEPSEEK_V3)
    assert model.moe is not None
    assert model.moe.layers == tuple(range(3, 61))
    assert model.moe.num_shared_experts == 1
    assert model.mla is not None
    assert model.mla.kv_lora_rank == 512
    assert model.quant_method == "fp8"
    assert model.targets == {"pytorch"}


def test_gpt_oss_alternates_windows():
    model = Architecture.from_hf_config(GPT_OSS_20B)
    assert model.sliding_window == SlidingWindow(128, tuple(range(0, 24, 2)))
    assert model.output_bias
    assert model.attention_sinks


def test_qwen2_has_bias_on_qkv_only_and_no_window_unless_asked():
    config = {**LLAMA_70B, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
    model = Architecture.from_hf_config(config)
    assert model.qkv_bias
    assert not model.output_bias
    assert model.sliding_window is None


def test_unsupported_architecture_names_the_supported_and_the_nearest():
    with pytest.raises(
        CheckpointError, match=r"LlamaForCausalLMX is not supported \(nearest: LlamaForCausalLM\).*Mixtral"
    ):
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
