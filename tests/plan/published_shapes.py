"""Published models' shapes, from their config.json."""

from typing import Any

from llmops.build.model.architecture import Architecture


def llama_config(**fields: Any) -> dict[str, Any]:
    """Return config.json of Llama 3.1 8B, with other `fields`."""
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", **fields,
    }  # fmt: skip


def llama(**fields: Any) -> Architecture:
    return Architecture.from_hf_config(llama_config(**fields))


LLAMA2_7B = llama(num_key_value_heads=32, intermediate_size=11008, vocab_size=32000, max_position_embeddings=4096)
LLAMA31_8B = llama()
LLAMA31_70B_CONFIG = llama_config(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
)
LLAMA31_70B = Architecture.from_hf_config(LLAMA31_70B_CONFIG)
LLAMA31_405B = llama(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128)
MISTRAL_7B = llama(
    architectures=["MistralForCausalLM"], vocab_size=32000, sliding_window=4096, max_position_embeddings=32768
)
MIXTRAL_8X7B = llama(architectures=["MixtralForCausalLM"], vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)
MIXTRAL_8X22B = llama(
    architectures=["MixtralForCausalLM"], vocab_size=32000, num_local_experts=8, num_experts_per_tok=2,
    hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
)  # fmt: skip
QWEN25_7B = llama(
    architectures=["Qwen2ForCausalLM"], hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
)  # fmt: skip
QWEN3_30B = llama(
    architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768,
)  # fmt: skip
GEMMA2_9B = llama(
    architectures=["Gemma2ForCausalLM"], hidden_size=3584, num_hidden_layers=42, num_attention_heads=16, head_dim=256,
    vocab_size=256000, sliding_window=4096, max_position_embeddings=8192,
)  # fmt: skip
PHI4 = llama(
    architectures=["Phi3ForCausalLM"], hidden_size=5120, intermediate_size=17920, num_hidden_layers=40,
    num_attention_heads=40, num_key_value_heads=10, vocab_size=100352,
)  # fmt: skip
DEEPSEEK_V3 = llama(
    architectures=["DeepseekV3ForCausalLM"], hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, vocab_size=129280, max_position_embeddings=163840,
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
    first_k_dense_replace=3, moe_layer_freq=1, num_nextn_predict_layers=1, quantization_config={"quant_method": "fp8"},
)  # fmt: skip
GPT_OSS_20B = llama(
    architectures=["GptOssForCausalLM"], attention_bias=True, head_dim=64, hidden_size=2880, intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12, num_attention_heads=64, num_experts_per_tok=4,
    num_hidden_layers=24, num_local_experts=32, sliding_window=128, vocab_size=201088,
    quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
