"""Write config.json of a TensorRT-LLM checkpoint from the Hugging Face config.

ModelOpt 0.47 writes its own config.json, but with transformers 5 it finds neither rope theta nor
rope scaling, which are now in `rope_parameters`. An engine from such a file would rotate with theta
10000. For Gemma 2, Gemma 3 and Phi-3, ModelOpt writes no config.json. The fields are defined in
NVIDIA/TensorRT-LLM `tensorrt_llm/models/{llama,qwen,gemma,phi3}/config.py`.
"""

from typing import Any

from llmops.build.model.architecture import Architecture

# Values of TensorRT-LLM's MoeConfig.ExpertScaleNormalizationMode.
_MOE_NONE, _MOE_RENORMALIZE = 0, 1
DECODER_TYPES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen", "qwen3": "qwen", "qwen3_moe": "qwen",
    "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3",
}  # fmt: skip


def trtllm_checkpoint_config(
    arch: Architecture,
    hf_config: Any,
    dtype: str,
    vocab_size: int,
    mapping: dict[str, int],
    quantization: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of config.json of a TensorRT-LLM checkpoint.

    `hf_config` is the source's config.json as transformers reads it. `vocab_size` is the size of
    the exported vocabulary, which is padded for AWQ. `mapping` has tp_size and pp_size.
    `quantization` is the field of the same name.
    """
    fields: dict[str, Any] = {
        "producer": _producer(),
        "architecture": "Gemma3ForCausalLM" if arch.family == "gemma3" else arch.hf_class,
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_size": arch.head_dim,
        "intermediate_size": _intermediate_size(arch),
        "max_position_embeddings": arch.max_position_embeddings,
        "norm_epsilon": hf_config.rms_norm_eps,
        "hidden_act": _hidden_act(arch, hf_config),
        "attn_bias": arch.qkv_bias,
        "mlp_bias": arch.mlp_bias,
        "qk_layernorm": arch.qk_norm,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": arch.family in ("gemma2", "gemma3") and mapping["pp_size"] == 1,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "mapping": _mapping(arch, mapping),
        "quantization": quantization,
        **rotary_fields(arch, hf_config),
    }
    return {**fields, **_moe(arch, hf_config), **_family(arch, hf_config)}


def _producer() -> dict[str, str]:
    from importlib.metadata import version

    return {"name": "modelopt", "version": version("nvidia-modelopt")}


def _intermediate_size(arch: Architecture) -> int:
    only_experts = arch.moe is not None and len(arch.moe.layers) == arch.num_layers
    return arch.moe.moe_intermediate_size if arch.moe is not None and only_experts else arch.intermediate_size


def _hidden_act(arch: Architecture, hf_config: Any) -> str:
    if arch.moe is not None or arch.family == "phi3":
        return "swiglu"
    return str(getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act)


def _mapping(arch: Architecture, mapping: dict[str, int]) -> dict[str, int]:
    tp, pp = mapping["tp_size"], mapping["pp_size"]
    sizes = {"world_size": tp * pp, "tp_size": tp, "pp_size": pp, "cp_size": 1}
    return {**sizes, "moe_tp_size": tp, "moe_ep_size": 1} if arch.moe else sizes


def rope_parameters(arch: Architecture, hf_config: Any) -> dict[str, Any]:
    """Return transformers' `rope_parameters` of the global layers.

    Gemma 3 has a separate mapping for each kind of layer.
    """
    parameters = dict(hf_config.rope_parameters)
    return dict(parameters["full_attention"]) if "full_attention" in parameters else parameters


def rotary_fields(arch: Architecture, hf_config: Any) -> dict[str, Any]:
    parameters = rope_parameters(arch, hf_config)
    fields: dict[str, Any] = {
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": float(parameters.pop("rope_theta")),
        "rotary_pct": float(parameters.pop("partial_rotary_factor", 1.0)),
        "rotary_scaling": None,
    }
    kind = parameters.get("rope_type", "default")
    if kind == "longrope":
        original = parameters.get("original_max_position_embeddings") or hf_config.original_max_position_embeddings
        fields |= {
            "position_embedding_type": "long_rope",
            "original_max_position_embeddings": original,
            "longrope_scaling_short_factors": parameters["short_factor"],
            "longrope_scaling_long_factors": parameters["long_factor"],
        }
    # "dynamic" changes nothing within max_position_embeddings, which no engine exceeds, and
    # trtllm-build fails on "dynamic" without `alpha` (1.2.1 `tensorrt_llm/functional.py`,
    # create_sinusoidal_positions_for_attention_plugin).
    elif kind not in ("default", "dynamic"):
        # TensorRT-LLM's llama reads `rope_type`, and older readers read `type`.
        fields["rotary_scaling"] = {**parameters, "type": kind}
    return fields


def _moe(arch: Architecture, hf_config: Any) -> dict[str, Any]:
    if arch.moe is None:
        return {}
    renormalise = getattr(hf_config, "norm_topk_prob", True)
    moe = {
        "num_experts": arch.moe.num_experts,
        "top_k": arch.moe.experts_per_token,
        "normalization_mode": _MOE_RENORMALIZE if renormalise else _MOE_NONE,
    }
    return {"moe": moe, "moe_intermediate_size": arch.moe.moe_intermediate_size}


def _family(arch: Architecture, hf_config: Any) -> dict[str, Any]:
    if arch.family in ("qwen2", "qwen3", "qwen3_moe"):
        return {"qwen_type": arch.family, "seq_length": arch.max_position_embeddings}
    if arch.family not in ("gemma2", "gemma3"):
        return {}
    fields = {
        "inter_layernorms": True,
        "query_pre_attn_scalar": hf_config.query_pre_attn_scalar,
        "final_logit_softcapping": hf_config.final_logit_softcapping,
    }
    if arch.family == "gemma2":
        return {**fields, "attn_logit_softcapping": hf_config.attn_logit_softcapping}
    local = dict(hf_config.rope_parameters).get("sliding_attention", {})
    # One of every `_sliding_window_pattern` layers sees all tokens. TensorRT-LLM divides by this
    # number.
    kinds = [*hf_config.layer_types, "full_attention"]
    return {
        **fields,
        "_sliding_window_pattern": kinds.index("full_attention") + 1,
        "rope_local_base_freq": local.get("rope_theta", 10000.0),
        "sliding_window": hf_config.sliding_window,
    }
