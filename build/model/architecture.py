"""Read the architecture of a model, its family and shapes, from config.json.

Neither weights nor a GPU are needed.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmops.build.model.families import FAMILIES, Family, family_of
from llmops.errors import CheckpointError, InputError

DTYPES = ("bfloat16", "float16", "float32")
_STORED_DTYPES = ("float16", "bfloat16")
#: Maximum value of a number in config.json: TensorRT-LLM's shapes are 32-bit integers.
_MAX_NUMBER = 2**31 - 1
#: Fields with a number that is not whole. A model computes with them in float32.
_REAL_NUMBERS = (
    "rms_norm_eps", "layer_norm_eps", "norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "routed_scaling_factor",
)  # fmt: skip
_MAX_REAL_NUMBER = 3e38
#: Maximum number of layers. Published merges of Llama 405B have up to 525. Plans take time in
#: proportion to the square: with 10,000 layers, more than a minute.
_MAX_LAYERS = 1024
#: Maximum number of labels of a classifier, each of which transformers names: 5 s for a million.
_MAX_LABELS = 2**16
#: Maximum size of an attention head, for whose rotary frequencies memory is taken early, too.
_MAX_HEAD_DIM = 2**14


@dataclass(frozen=True)
class MoeShape:
    """The shapes of a model's mixture-of-experts (MoE) layers.

    `layers` are the indices of the layers that have experts; other layers are dense. `latent_size`
    is the width of the projection on which the routed experts work, 0 without a projection.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    layers: tuple[int, ...]
    num_shared_experts: int = 0
    expert_bias: bool = False
    latent_size: int = 0


@dataclass(frozen=True)
class RecurrentShape:
    """The shapes of layers with a state of fixed size per sequence: linear attention or Mamba 2.

    `layers` are the indices of these layers. Each head has a state of `head_dim` x `state` values
    in float32. `groups` is the number of key heads, or of Mamba's groups. A sequence also keeps the
    last `kernel - 1` inputs of the convolution. `RecurrentFields` describes `gates`, `vectors` and
    `wide_norm`.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    gates: int
    vectors: int
    conv_bias: bool
    wide_norm: bool

    @property
    def inner_size(self) -> int:
        """Return the width of all heads together."""
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Return the number of channels of the convolution."""
        return self.inner_size + 2 * self.groups * self.state


@dataclass(frozen=True)
class MlaShape:
    """The shape of multi-head latent attention.

    The KV cache holds `kv_lora_rank + qk_rope_head_dim` values per token and layer.

    `index_heads` and `index_head_dim` are the number and width of the heads of the indexer that
    selects tokens for sparse attention (DeepSeek V3.2), and 0 without an indexer.
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
    """Sliding-window attention.

    The layers with an index in `layers` see only the last `size` tokens. Other layers see all
    tokens.
    """

    size: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """The shapes of a decoder-only transformer, in the names of TensorRT-LLM.

    `family` is the name of the model's `Family`, and `hf_class` is `architectures[0]` of
    config.json. `dtype` is the dtype of unquantised weights. `quant_method` is the method of a
    checkpoint that is itself quantised (fp8, mxfp4, awq, modelopt, …), or None. `next_token_layers`
    is the number of layers for multi-token prediction, which `num_layers` does not count. These
    layers have their own embedding and head if `next_token_embeddings` is True. `attention_layers`
    are the indices of the layers with attention, and `mlp_layers` of the layers with an MLP or
    experts; None means all layers. `attention_gate` is True if queries have an output gate of the
    same size.
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
    next_token_embeddings: bool = True
    recurrent: RecurrentShape | None = None
    attention_layers: tuple[int, ...] | None = None
    mlp_layers: tuple[int, ...] | None = None
    attention_gate: bool = False
    gated_mlp: bool = True

    def has_attention(self, layer: int) -> bool:
        """Return True if the layer has attention, and therefore a KV cache."""
        return self.attention_layers is None or layer in self.attention_layers

    def is_recurrent(self, layer: int) -> bool:
        """Return True if the layer has a state of fixed size instead of a KV cache."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def is_moe(self, layer: int) -> bool:
        """Return True if the layer has experts."""
        return self.moe is not None and layer in self.moe.layers

    def is_dense(self, layer: int) -> bool:
        """Return True if the layer has an MLP without experts."""
        return (self.mlp_layers is None or layer in self.mlp_layers) and not self.is_moe(layer)

    @property
    def has_dense_layers(self) -> bool:
        """Return True if any layer has an MLP without experts."""
        return any(map(self.is_dense, range(self.num_layers)))

    @property
    def targets(self) -> frozenset[str]:
        """Return the targets (of openvino, tensorrt and pytorch) that can serve the model."""
        family: Family = FAMILIES[self.family]
        return family.targets

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read an architecture from the content of config.json.

        Raises:
            CheckpointError: The architecture is not supported, or a field is missing or has an
                impossible value.
        """
        hf_class = _hf_class(config)
        family = family_of(hf_class)
        if family is None:
            raise CheckpointError(_unsupported(hf_class))
        return _ConfigReader(hf_class, family, config).architecture()


def stored_dtype(arch: Architecture, requested: object = None) -> str:
    """Return the dtype, float16 or bfloat16, in which the engine stores unquantised weights.

    Args:
        arch: The architecture. Weights in float32 are stored as float16.
        requested: The value of `--set dtype`, or None.

    Raises:
        InputError: `requested` is neither float16 nor bfloat16.
    """
    if requested is not None and requested not in _STORED_DTYPES:
        raise InputError(f"--set dtype={requested} is not possible; choose {' or '.join(_STORED_DTYPES)}.")
    return str(requested) if requested else arch.dtype if arch.dtype in _STORED_DTYPES else "float16"


def _shorten(value: Any) -> str:
    """Return the `repr` of the value, cut to 40 characters."""
    text = reprlib.repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, int | float):
        yield value
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _numbers(one)


def _check_counts(config: Any) -> None:
    """Raise CheckpointError for counts, also of parts that are not built, in config.json.

    transformers makes a list of the layers of each part, and names all labels.
    """
    for name, value in config.items() if isinstance(config, Mapping) else ():
        most = _MAX_LABELS if name == "num_labels" else _MAX_LAYERS if name.endswith("layers") else None
        if most is not None and isinstance(value, int | float) and value > most:
            raise CheckpointError(
                f"config.json has `{name}` = {_shorten(value)}, and at most {most} are possible; download it again."
            )
        _check_counts(value)


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
            f"{hf_class} is an embedding model, which generates no text; download it and build its folder, which "
            "takes seconds."
        )
    known = [name for family in FAMILIES.values() for name in family.hf_classes]
    near = difflib.get_close_matches(hf_class[:80], known, n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    return (
        f"The architecture {hf_class[:80]} is not supported{hint}; supported are {', '.join(known)}. Use a "
        "checkpoint of a supported architecture."
    )


#: Kinds of layers by the name in `layer_types`, `layers_block_type` or `hybrid_override_pattern`.
_LAYER_KINDS = {
    **dict.fromkeys(("full_attention", "attention", "*"), "attention"),
    **dict.fromkeys(("linear_attention", "mamba", "M"), "recurrent"),
    **dict.fromkeys(("moe", "E"), "moe"),
    **dict.fromkeys(("mlp", "-"), "mlp"),
}


def _places(kinds: list[str], *wanted: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)


class _ConfigReader:
    """A reader of one config.json.

    The fields of a text model inside a multimodal model are in `text_config`.
    """

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

    def check_real_numbers(self) -> None:
        for name, value in [*self.config.items(), *self.outer.items()]:
            if name not in _REAL_NUMBERS or value is None:
                continue
            # The comparison is False for NaN.
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_REAL_NUMBER:
                raise CheckpointError(
                    f"config.json has `{name}` = {_shorten(value)}; it must be a number from 0 to {_MAX_REAL_NUMBER:g}."
                )
        for name in ("rope_scaling", "rope_parameters"):
            for value in _numbers([self.config.get(name), self.outer.get(name)]):
                if not 0 <= value <= _MAX_REAL_NUMBER:
                    raise CheckpointError(
                        f"config.json has {_shorten(value)} in `{name}`, whose numbers must be from 0 to "
                        f"{_MAX_REAL_NUMBER:g}."
                    )

    def layers(self) -> int:
        # config.json of Nemotron 3 Ultra lists the layers and does not count them.
        named = self.raw("layers_block_type")
        return self._bounded_layers(
            self.integer("num_hidden_layers", default=len(named) if isinstance(named, list) else None)
        )

    @staticmethod
    def _bounded_layers(count: int) -> int:
        """Return `count`. Raise CheckpointError for more layers than any model has."""
        if count > _MAX_LAYERS:
            raise CheckpointError(
                f"config.json has {count} layers, and at most {_MAX_LAYERS} are possible; download config.json again."
            )
        return count

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        return default if value is None else bool(value)

    def architecture(self) -> Architecture:
        self.check_real_numbers()
        _check_counts(self.outer)
        heads = self.integer("num_attention_heads")
        layers = self.layers()
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json has {heads} attention heads for {kv_heads} KV heads; num_attention_heads must be a "
                "multiple of num_key_value_heads."
            )
        bias = self.flag("attention_bias")
        kinds = self.layer_kinds(layers)
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
            moe=self.moe(layers, kinds),
            mla=self.mla(),
            sliding_window=self.sliding_window(layers),
            quant_method=self.quant_method(),
            next_token_layers=self._bounded_layers(
                self.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, at_least=0)
            ),
            next_token_embeddings=self.flag("mtp_use_dedicated_embeddings", self.family.recurrent is None),
            recurrent=self.recurrent(kinds),
            attention_layers=_places(kinds, "attention") if kinds else None,
            mlp_layers=_places(kinds, "mlp", "moe") if kinds and self.single_blocks else None,
            attention_gate=self.flag("attn_output_gate"),
            gated_mlp=self.family.gated_mlp,
        )

    @property
    def single_blocks(self) -> bool:
        return self.family.recurrent is not None and self.family.recurrent.single_blocks

    def layer_kinds(self, layers: int) -> list[str]:
        """Return the kind of each layer in a family with recurrent layers.

        The kinds are attention, recurrent, moe and mlp.
        """
        if self.family.recurrent is None:
            return []
        kinds = self.raw("layers_block_type", "layer_types", "hybrid_override_pattern") or ()
        if not isinstance(kinds, list | tuple | str):
            kinds = ()
        found = [_LAYER_KINDS.get(kind, "") if isinstance(kind, str) else "" for kind in kinds]
        if len(found) != layers or "" in found:
            raise CheckpointError(
                f"config.json of {self.hf_class} does not name the kinds of its {layers} layers; add `layer_types`, "
                "`layers_block_type` or `hybrid_override_pattern`."
            )
        return found

    def recurrent(self, kinds: list[str]) -> RecurrentShape | None:
        fields = self.family.recurrent
        if fields is None:
            return None
        heads, groups = self.integer(fields.heads), self.integer(fields.groups)
        if heads % groups:
            raise CheckpointError(
                f"config.json has {heads} recurrent heads, which must be a multiple of the {groups} groups; download "
                "config.json again."
            )
        return RecurrentShape(
            layers=_places(kinds, "recurrent"),
            heads=heads,
            head_dim=self.integer(fields.head_dim),
            groups=groups,
            state=self.integer(fields.state),
            kernel=self.integer(fields.kernel),
            gates=fields.gates,
            vectors=fields.vectors,
            conv_bias=fields.conv_bias,
            wide_norm=fields.wide_norm,
        )

    def head_dim(self, heads: int) -> int:
        found = self._head_dim(heads)
        if found > _MAX_HEAD_DIM or found % 2:
            raise CheckpointError(
                f"config.json has heads of {found}, and only even sizes of at most {_MAX_HEAD_DIM} are possible; "
                "download config.json again."
            )
        return found

    def _head_dim(self, heads: int) -> int:
        if self.raw("head_dim") is not None:
            return self.integer("head_dim")
        hidden = self.integer("hidden_size")
        if hidden % heads:
            raise CheckpointError(
                f"config.json has no `head_dim` and hidden_size {hidden} is not a multiple of {heads} heads; add "
                "head_dim."
            )
        return hidden // heads

    def intermediate_size(self) -> int:
        return self.integer(self.family.dense_size)

    def dtype(self) -> str:
        value = str(self.raw("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
        if value not in DTYPES:
            raise CheckpointError(
                f"config.json has the dtype {_shorten(value)}; it must be one of {', '.join(DTYPES)}."
            )
        return value

    def moe(self, layers: int, kinds: list[str]) -> MoeShape | None:
        fields = self.family.moe
        if fields is None:
            return None
        first = self.integer("first_k_dense_replace", default=0, at_least=0)
        step = self.integer("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1)
        dense = self.raw("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise CheckpointError(
                f"config.json has `mlp_only_layers` = {_shorten(dense)}; it must be a list of layer indices."
            )
        excluded = {layer for layer in dense if isinstance(layer, int)}
        moe_layers = tuple(i for i in range(first, layers) if self.is_moe(i, step) and i not in excluded)
        if self.single_blocks:
            moe_layers = _places(kinds, "moe")
        size = self.integer(*fields.intermediate_size)
        return MoeShape(
            num_experts=self.integer(*fields.num_experts),
            experts_per_token=self.integer(*fields.experts_per_token),
            moe_intermediate_size=size,
            layers=moe_layers,
            num_shared_experts=self.shared_experts(size),
            expert_bias=fields.expert_bias,
            latent_size=self.integer("moe_latent_size", default=0, at_least=0),
        )

    def shared_experts(self, size: int) -> int:
        """Return the number of shared experts, each of width `size`.

        A shared expert that is twice as wide as `size` counts as two.
        """
        width = self.integer("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=0,
                             at_least=0)  # fmt: skip
        count = self.integer("n_shared_experts", default=self.family.shared_experts, at_least=0)
        return width // size if width else count

    @staticmethod
    def is_moe(layer: int, step: int) -> bool:
        # Qwen and Llama 4 count layers from 1. DeepSeek counts from 0, but all its models have step
        # 1, with which both counts agree.
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
        # One layer with global attention follows `pattern - 1` layers with a window. With 0, all
        # layers have a window.
        pattern = self.integer("sliding_window_pattern", default=self.family.window_pattern, at_least=0)
        first = self.integer("max_window_layers", default=0, at_least=0)
        return tuple(i for i in range(first, layers) if pattern == 0 or (i + 1) % pattern)

    def quant_method(self) -> str | None:
        quantised = self.outer.get("quantization_config")
        return str(quantised.get("quant_method", "unknown")) if isinstance(quantised, Mapping) else None
