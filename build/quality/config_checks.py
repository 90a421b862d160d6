"""Does the exported config.json describe the source? A wrong number there is a fault, whatever it costs."""

from __future__ import annotations

from typing import Any

from llmops.build.model.architecture import Architecture
from llmops.build.quantize.hf_config import with_transformers4_keys
from llmops.errors import BuildError

# what a Hugging Face export may say differently
_IGNORED_FIELDS = {
    "dtype", "torch_dtype", "transformers_version", "quantization_config", "_name_or_path", "use_cache",
    "architectures", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
_RENORMALISED = {True: 1, False: 0}


def check_engine_config(exported: dict[str, Any], arch: Architecture, source: dict[str, Any]) -> None:
    """config.json of a TensorRT-LLM checkpoint against the source's. Raises BuildError naming what differs."""
    wanted: dict[str, Any] = {
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_size": arch.head_dim,
        "max_position_embeddings": arch.max_position_embeddings,
        "qk_layernorm": arch.qk_norm,
        **_numbers(source),
    }
    if arch.moe is not None:
        wanted |= {"moe.num_experts": arch.moe.num_experts, "moe.top_k": arch.moe.experts_per_token}
        wanted["moe_intermediate_size"] = arch.moe.moe_intermediate_size
        wanted["moe.normalization_mode"] = _RENORMALISED[bool(source.get("norm_topk_prob", True))]
    _refuse(exported, wanted)


def _numbers(source: dict[str, Any]) -> dict[str, Any]:
    """RoPE and norm, wherever the source's transformers kept them."""
    old = with_transformers4_keys(source)
    old = {**old, **old["text_config"]} if isinstance(old.get("text_config"), dict) else old
    names = {"norm_epsilon": "rms_norm_eps", "rotary_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    return {ours: old[theirs] for ours, theirs in names.items() if old.get(theirs) is not None}


def check_hf_config(exported: dict[str, Any], source: dict[str, Any]) -> None:
    """config.json of a Hugging Face export: every number and switch of the source. TensorRT-LLM 1.2 reads the older
    spelling, so that is what counts where both are there."""
    wanted = {name: value for name, value in with_transformers4_keys(source).items() if name not in _IGNORED_FIELDS}
    _refuse({**with_transformers4_keys(exported), **exported}, wanted)


def _refuse(exported: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        found = _get(exported, name)
        if not _same(found, value):
            raise BuildError(
                f"the exported config.json has {name} = {found!r}, the source has {value!r}: a fault in the export, no "
                "cost of quantising. Build again; if it stays, report it."
            )


def _get(config: dict[str, Any], name: str) -> Any:
    first, _, rest = name.partition(".")
    value = config.get(first)
    return _get(value, rest) if rest and isinstance(value, dict) else value


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(_same(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, float) or isinstance(found, float):
        return isinstance(found, int | float) and isinstance(wanted, int | float) and _close(found, wanted)
    return bool(found == wanted)


def _close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= 1e-6 * abs(wanted)
