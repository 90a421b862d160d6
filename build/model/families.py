"""The table of the model families that can be planned and built."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmops.build.target_facts import NAMES

EVERY_TARGET = frozenset(NAMES)
NO_ENGINE = frozenset({"openvino", "pytorch"})
PYTORCH_ONLY = frozenset({"pytorch"})


@dataclass(frozen=True)
class MoeFields:
    """The names of the config.json fields with a family's MoE shape.

    Each tuple has alternative names, of which the first that config.json has is used. `expert_bias`
    is True if experts have biases.
    """

    num_experts: tuple[str, ...]
    experts_per_token: tuple[str, ...]
    intermediate_size: tuple[str, ...]
    expert_bias: bool = False


@dataclass(frozen=True)
class RecurrentFields:
    """The config.json fields that describe layers with a state of fixed size and no KV cache.

    The text fields are names in config.json. `gates` is the number of values per head that the
    input projection returns beside its vectors. `vectors` is the number of parameters per head
    outside the matrices. `wide_norm` is True if the norm is as wide as all heads together, and not
    as one head. With `single_blocks`, a layer is either attention, recurrent or MLP; otherwise each
    layer has an MLP beside attention or recurrence.
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
    """A model family: classes of transformers whose weights have the same structure.

    `targets` are the targets that can serve the family: `tensorrt` if ModelOpt exports a checkpoint
    that trtllm-build 1.2.1 accepts, `pytorch` if TensorRT-LLM's PyTorch backend has the model, and
    `openvino` if optimum-intel exports the model. Weights of a family with `as_published` are used
    unchanged and never quantised by llmops. `tied` is the default of tie_word_embeddings.
    `dense_size` is the config.json field with the width of dense layers. `shared_experts` is the
    number of experts that every token passes through, for a family whose config.json does not say.
    `window_pattern` is the default of sliding_window_pattern. `defaults` are values of fields that
    the family's config.json leaves out. `since` is the first release line of TensorRT-LLM whose
    PyTorch backend has the model.
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


#: Defaults of transformers' Gemma3TextConfig. Published config.json files of Gemma 3 hold only the
#: fields with other values.
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_GEMMA2_DEFAULTS = {"head_dim": 256, "sliding_window": 4096}
#: Default of transformers' Qwen2Config, Qwen3Config and Qwen3MoeConfig, where `sliding_window`
#: alone has no effect.
_QWEN_DEFAULTS = {"use_sliding_window": False}

_QWEN_EXPERTS = MoeFields(("num_experts", "num_local_experts"), ("num_experts_per_tok",), ("moe_intermediate_size",))
_LOCAL_EXPERTS = MoeFields(("num_local_experts",), ("num_experts_per_tok",), ("intermediate_size",))
_ROUTED_EXPERTS = MoeFields(("n_routed_experts",), ("num_experts_per_tok",), ("moe_intermediate_size",))

#: Fields of Gated DeltaNet, as transformers' Qwen3NextGatedDeltaNet reads them.
_DELTA_NET = RecurrentFields(
    heads="linear_num_value_heads", head_dim="linear_value_head_dim", groups="linear_num_key_heads",
    state="linear_key_head_dim", kernel="linear_conv_kernel_dim", gates=2, vectors=2,
)  # fmt: skip
#: Fields of Mamba 2, as modeling_nemotron_h.py of NVIDIA's checkpoints reads them.
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
    # Added by NVIDIA/TensorRT-LLM #10532. Its supported-models.md lists the class at 1.3.0rc13, and
    # not at 1.3.0rc29.
    Family("minimax_m2", ("MiniMaxM2ForCausalLM",), PYTORCH_ONLY, as_published=True, qk_norm=True,
           moe=_LOCAL_EXPERTS, since=(1, 3)),
    Family("llama4", ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"), PYTORCH_ONLY, as_published=True,
           dense_size="intermediate_size_mlp", shared_experts=1, moe=_LOCAL_EXPERTS),
    # Added by NVIDIA/TensorRT-LLM #12242, in 1.3.0rc9. 1.3.0rc29's supported-models.md lists the
    # class with experts.
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
    """Return the family that has the class `hf_class`, or None."""
    return next((family for family in _ALL if hf_class in family.hf_classes), None)
