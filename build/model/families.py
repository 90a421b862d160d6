"""The table of model families that can be planned and built."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmops.build.target_facts import NAMES

EVERY_TARGET = frozenset(NAMES)
NO_ENGINE = frozenset({"openvino", "pytorch"})
PYTORCH_ONLY = frozenset({"pytorch"})


@dataclass(frozen=True)
class MoeFields:
    """The config.json fields of a family's MoE shape. The first field found of each tuple wins."""

    num_experts: tuple[str, ...]
    experts_per_token: tuple[str, ...]
    intermediate_size: tuple[str, ...]
    expert_bias: bool = False


@dataclass(frozen=True)
class RecurrentFields:
    """The config.json fields of layers with a state of fixed size in place of a KV cache.

    `gates` counts the numbers per head that the input projection makes beside its vectors,
    `vectors` the parameters per head; `wide_norm` is True if the norm is as wide as all heads, not
    one. With `single_blocks` a layer is attention, recurrent or MLP, and not a mixer with an MLP.
    """

    heads: str
    head_dim: str
    groups: str
    state: str
    kernel: str
    gates: int
    vectors: int
    conv_bias: bool = False
    wide_norm: bool = False
    single_blocks: bool = False


@dataclass(frozen=True)
class Family:
    """A model family.

    `targets` can serve it: `tensorrt` where ModelOpt exports a TensorRT-LLM checkpoint that
    trtllm-build 1.2.1 takes, `pytorch` where TensorRT-LLM's PyTorch backend has the model,
    `openvino` where optimum-intel exports it. `defaults` are values that its config.json leaves out
    on purpose. A family `as_published` is passed on unchanged and never quantised here.
    `dense_size` is the config.json field with the width of dense layers; `shared_experts` counts
    experts that every token passes through where config.json does not. `since` is the first release
    line of TensorRT-LLM whose PyTorch backend has the model.
    """

    name: str
    hf_classes: tuple[str, ...]
    targets: frozenset[str]
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    norms_per_layer: int = 2
    mla: bool = False
    moe: MoeFields | None = None
    as_published: bool = False
    dense_size: str = "intermediate_size"
    shared_experts: int = 0
    window_pattern: int = 0
    recurrent: RecurrentFields | None = None
    gated_mlp: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    since: tuple[int, int] = (1, 2)


#: transformers' Gemma3TextConfig: published Gemma 3 files hold only what differs from these values.
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_GEMMA2_DEFAULTS = {"head_dim": 256, "sliding_window": 4096}
#: transformers' Qwen2Config, Qwen3Config and Qwen3MoeConfig: `sliding_window` alone has no effect.
_QWEN_DEFAULTS = {"use_sliding_window": False}

_QWEN_EXPERTS = MoeFields(("num_experts", "num_local_experts"), ("num_experts_per_tok",), ("moe_intermediate_size",))
_LOCAL_EXPERTS = MoeFields(("num_local_experts",), ("num_experts_per_tok",), ("intermediate_size",))
_ROUTED_EXPERTS = MoeFields(("n_routed_experts",), ("num_experts_per_tok",), ("moe_intermediate_size",))

#: Gated DeltaNet, as in transformers' Qwen3NextGatedDeltaNet.
_DELTA_NET = RecurrentFields(
    heads="linear_num_value_heads", head_dim="linear_value_head_dim", groups="linear_num_key_heads",
    state="linear_key_head_dim", kernel="linear_conv_kernel_dim", gates=2, vectors=2,
)  # fmt: skip
#: Mamba 2, as in the modeling_nemotron_h.py of NVIDIA's checkpoints.
_MAMBA = RecurrentFields(
    heads="mamba_num_heads", head_dim="mamba_head_dim", groups="n_groups", state="ssm_state_size",
    kernel="conv_kernel", gates=1, vectors=3, conv_bias=True, wide_norm=True, single_blocks=True,
)  # fmt: skip

_ALL = (
    Family("llama", ("LlamaForCausalLM",), EVERY_TARGET),
    Family("mistral", ("MistralForCausalLM",), EVERY_TARGET),
    Family("mixtral", ("MixtralForCausalLM",), EVERY_TARGET, moe=_LOCAL_EXPERTS),
    Family("qwen2", ("Qwen2ForCausalLM",), EVERY_TARGET, qkv_bias=True, defaults=_QWEN_DEFAULTS),
    Family("qwen3", ("Qwen3ForCausalLM",), EVERY_TARGET, qk_norm=True, defaults=_QWEN_DEFAULTS),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), EVERY_TARGET, qk_norm=True, moe=_QWEN_EXPERTS,
           defaults=_QWEN_DEFAULTS),
    Family("gemma2", ("Gemma2ForCausalLM",), EVERY_TARGET - {"pytorch"}, tied=True, norms_per_layer=4,
           window_pattern=2, defaults=_GEMMA2_DEFAULTS),
    Family("gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), EVERY_TARGET, tied=True, qk_norm=True,
           norms_per_layer=4, window_pattern=6, defaults=_GEMMA3_DEFAULTS),
    Family("phi3", ("Phi3ForCausalLM",), EVERY_TARGET),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM",), PYTORCH_ONLY, mla=True, as_published=True, moe=_ROUTED_EXPERTS),
    Family("deepseek_v32", ("DeepseekV32ForCausalLM",), PYTORCH_ONLY, mla=True, as_published=True,
           moe=_ROUTED_EXPERTS),
    Family("glm4_moe", ("Glm4MoeForCausalLM",), PYTORCH_ONLY, as_published=True, qkv_bias=True, qk_norm=True,
           moe=_ROUTED_EXPERTS),
    # NVIDIA/TensorRT-LLM #10532; its supported-models.md lists the class from 1.3.0rc13 on
    Family("minimax_m2", ("MiniMaxM2ForCausalLM",), PYTORCH_ONLY, as_published=True, qk_norm=True,
           moe=_LOCAL_EXPERTS, since=(1, 3)),
    Family("llama4", ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"), PYTORCH_ONLY, as_published=True,
           dense_size="intermediate_size_mlp", shared_experts=1, moe=_LOCAL_EXPERTS),
    # NVIDIA/TensorRT-LLM #12242, in 1.3.0rc9
    Family("qwen3_5", ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"), PYTORCH_ONLY,
           as_published=True, qk_norm=True, recurrent=_DELTA_NET, since=(1, 3)),
    Family("qwen3_5_moe", ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"), PYTORCH_ONLY,
           as_published=True, qk_norm=True, recurrent=_DELTA_NET, dense_size="moe_intermediate_size",
           moe=_QWEN_EXPERTS, since=(1, 3)),
    Family("nemotron_h", ("NemotronHForCausalLM",), PYTORCH_ONLY, as_published=True, norms_per_layer=1,
           recurrent=_MAMBA, gated_mlp=False, moe=_ROUTED_EXPERTS, since=(1, 3)),
    Family("gpt_oss", ("GptOssForCausalLM",), NO_ENGINE, as_published=True, attention_sinks=True, window_pattern=2,
           moe=replace(_LOCAL_EXPERTS, expert_bias=True)),
)  # fmt: skip

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family_of(hf_class: str) -> Family | None:
    """Return the family whose config names this class under `architectures`, or None."""
    return next((family for family in _ALL if hf_class in family.hf_classes), None)
