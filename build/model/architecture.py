"""The architecture of a model, read from config.json: its family and shapes.

Needs neither weights nor a GPU.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmops.build.model.families import FAMILIES, Family, family_of
from llmops.errors import CheckpointError, InputError

DTYPES = ("bfloat16", "float16", "float32")
_STORED_DTYPES = ("float16", "bfloat16")
#: Largest number in config.json: what TensorRT-LLM's 32-bit shapes hold.
_MAX_NUMBER = 2**31 - 1
#: Largest number of layers, because lists with an entry per layer are made before other checks.
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class MoeShape:
    """The experts of an MoE layer.

    `layers` are the indices of the layers that have experts; the others are dense.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    layers: tuple[int, ...]
    num_shared_experts: int = 0
    expert_bias: bool = False


@dataclass(frozen=True)
class MlaShape:
    """The shape of multi-head latent attention.

    The KV cache holds `kv_lora_rank + qk_rope_head_dim` values per token and layer.

    `index_heads` and `index_head_dim` belong to the indexer that picks tokens in sparse attention
    (DeepSeek V3.2), zero where there is none.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_heads: int = 0
    index_head_dim: int = 0


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding-window attention: `layers` (indices) see only the last `size` tokens, the others all."""

    size: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """The shapes of a decoder-only transformer, in the names of TensorRT-LLM.

    `hf_class` is `architectures[0]`; `dtype` is the dtype of unquantised weights; `quant_method` is
    set when the checkpoint itself is quantised (fp8, mxfp4, awq, modelopt, …); `next_token_layers`
    counts extra layers for multi-token prediction beside `num_layers`.
    """

    family: str
    hf_class: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    norms_per_layer: int = 2
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    sliding_window: SlidingWindow | None = None
    quant_method: str | None = None
    next_token_layers: int = 0

    @property
    def targets(self) -> frozenset[str]:
        """Return the targets (of openvino, tensorrt and pytorch) that can serve the model."""
        family: Family = FAMILIES[self.family]
        return family.targets

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read an architecture from the content of config.json.

        Raises:
            CheckpointError: The architecture is not supported, or a field is missing or senseless.
        """
        hf_class = _hf_class(config)
        family = family_of(hf_class)
        if family is None:
            raise CheckpointError(_unsupported(hf_class))
        return _ConfigReader(hf_class, family, config).architecture()


def stored_dtype(arch: Architecture, requested: object = None) -> str:
    """Return the dtype (float16 or bfloat16) in which weights that are not quantised are stored.

    Args:
        arch: The architecture; float32 sources are stored as float16.
        requested: The value of `--set dtype`, or None.

    Raises:
        InputError: The requested dtype is neither of the two.
    """
    if requested is not None and requested not in _STORED_DTYPES:
        raise InputError(f"--set dtype={requested}: weights are stored in {' or '.join(_STORED_DTYPES)}.")
    return str(requested) if requested else arch.dtype if arch.dtype in _STORED_DTYPES else "float16"


def _shorten(value: Any) -> str:
    """Return the value as Python writes it, cut to 40 characters."""
    text = reprlib.repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _hf_class(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            "config.json has no `architectures` list; take the config.json of the Hugging Face checkpoint."
        )
    return names[0]


def _unsupported(hf_class: str) -> str:
    if hf_class.endswith("Model"):
        return (
            f"{hf_class} is an embedding model, not one that generates text; download it and build its folder, which "
            "takes seconds."
        )
    known = [name for family in FAMILIES.values() for name in family.hf_classes]
    near = difflib.get_close_matches(hf_class, known, n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    return (
        f"architecture {hf_class[:80]} is not supported{hint}; supported are {', '.join(known)}. Use a "
        "checkpoint of one of these."
    )


class _ConfigReader:
    """A reader of one config. Text models nested in a multimodal one are in `text_config`."""

    def __init__(self, hf_class: str, family: Family, config: Mapping[str, Any]) -> None:
        nested = config.get("text_config")
        self.outer = config
        self.config: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
        self.hf_class, self.family = hf_class, family

    def raw(self, *names: str) -> Any:
        for source in (self.config, self.outer, self.family.defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return None

    def integer(self, *names: str, default: int | None = None, at_least: int = 1) -> int:
        value = self.raw(*names)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(
                f"config.json of {self.hf_class} has no `{names[0]}`; add the field or take a complete config.json."
            )
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= _MAX_NUMBER:
            raise CheckpointError(
                f"config.json has `{names[0]}` = {_shorten(value)}; it must be a whole number from {at_least} to "
                f"{_MAX_NUMBER}."
            )
        return value

    def layers(self) -> int:
        count = self.integer("num_hidden_layers")
        if count > _MAX_LAYERS:
            raise CheckpointError(f"config.json has {count} layers; at most {_MAX_LAYERS} can be right.")
        return count

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        return default if value is None else bool(value)

    def architecture(self) -> Architecture:
        heads = self.integer("num_attention_heads")
        layers = self.layers()
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json has {heads} attention heads for {kv_heads} KV heads; num_attention_heads must be a "
                "multiple of num_key_value_heads."
            )
        bias = self.flag("attention_bias")
        return Architecture(
            family=self.family.name,
            hf_class=self.hf_class,
            hidden_size=self.integer("hidden_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim(heads),
            intermediate_size=self.intermediate_size(),
            vocab_size=self.integer("vocab_size"),
            max_position_embeddings=self.integer("max_position_embeddings"),
            tie_word_embeddings=self.flag("tie_word_embeddings", self.family.tied),
            dtype=self.dtype(),
            qkv_bias=bias or self.family.qkv_bias,
            output_bias=bias and not self.family.qkv_bias,
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=self.family.qk_norm,
            attention_sinks=self.family.attention_sinks,
            norms_per_layer=self.family.norms_per_layer,
            moe=self.moe(layers),
            mla=self.mla(),
            sliding_window=self.sliding_window(layers),
            quant_method=self.quant_method(),
            next_token_layers=self.integer("num_nextn_predict_layers", default=0, at_least=0),
        )

    def head_dim(self, heads: int) -> int:
        if self.raw("head_dim") is not None:
            return self.integer("head_dim")
        hidden = self.integer("hidden_size")
        if hidden % heads:
            raise CheckpointError(
                f"config.json has no `head_dim` and hidden_size {hidden} is not a multiple of {heads} heads."
            )
        return hidden // heads

    def intermediate_size(self) -> int:
        return self.integer(self.family.dense_size)

    def dtype(self) -> str:
        value = str(self.raw("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
        if value not in DTYPES:
            raise CheckpointError(f"config.json has the dtype {_shorten(value)}; known are {', '.join(DTYPES)}.")
        return value

    def moe(self, layers: int) -> MoeShape | None:
        fields = self.family.moe
        if fields is None:
            return None
        first = self.integer("first_k_dense_replace", default=0, at_least=0)
        step = self.integer("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1)
        dense = self.raw("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise CheckpointError(
                f"config.json has `mlp_only_layers` = {_shorten(dense)}; it must be a list of layers."
            )
        moe_layers = tuple(i for i in range(first, layers) if self.is_moe(i, step) and i not in dense)
        return MoeShape(
            num_experts=self.integer(*fields.num_experts),
            experts_per_token=self.integer(*fields.experts_per_token),
            moe_intermediate_size=self.integer(*fields.intermediate_size),
            layers=moe_layers,
            num_shared_experts=self.integer("n_shared_experts", default=self.family.shared_experts, at_least=0),
            expert_bias=fields.expert_bias,
        )

    @staticmethod
    def is_moe(layer: int, step: int) -> bool:
        # Qwen and Llama 4 count from one. DeepSeek counts from zero but publishes only step 1,
        # where both agree.
        return (layer + 1) % step == 0

    def mla(self) -> MlaShape | None:
        if not self.family.mla:
            return None
        return MlaShape(
            q_lora_rank=self.integer("q_lora_rank") if self.raw("q_lora_rank") is not None else None,
            kv_lora_rank=self.integer("kv_lora_rank"),
            qk_nope_head_dim=self.integer("qk_nope_head_dim"),
            qk_rope_head_dim=self.integer("qk_rope_head_dim"),
            v_head_dim=self.integer("v_head_dim"),
            index_heads=self.integer("index_n_heads", default=0, at_least=0),
            index_head_dim=self.integer("index_head_dim", default=0, at_least=0),
        )

    def sliding_window(self, layers: int) -> SlidingWindow | None:
        size = self.raw("sliding_window")
        if size is None or not self.flag("use_sliding_window", True):
            return None
        window = self.integer("sliding_window")
        local = self.local_layers(layers)
        return SlidingWindow(window, local) if local and window < self.integer("max_position_embeddings") else None

    def local_layers(self, layers: int) -> tuple[int, ...]:
        types = self.raw("layer_types")
        if isinstance(types, list) and len(types) == layers:
            return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
        # One global layer follows every `pattern - 1` local ones; 0 means that all are local.
        pattern = self.integer("sliding_window_pattern", default=self.family.window_pattern, at_least=0)
        first = self.integer("max_window_layers", default=0, at_least=0)
        return tuple(i for i in range(first, layers) if pattern == 0 or (i + 1) % pattern)

    def quant_method(self) -> str | None:
        quantised = self.outer.get("quantization_config")
        return str(quantised.get("quant_method", "unknown")) if isinstance(quantised, Mapping) else None
