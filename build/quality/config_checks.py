"""Check that the exported config.json has the values of the source.

A wrong number in config.json is a fault of the export, and no loss by quantisation.
"""

from typing import Any

from llmops.build.model.architecture import Architecture
from llmops.build.quantize.hf_config import with_transformers4_keys
from llmops.errors import BuildError

#: Fields of config.json that may differ between a Hugging Face export and its source.
_IGNORED_FIELDS = {
    "dtype", "torch_dtype", "transformers_version", "quantization_config", "_name_or_path", "use_cache",
    "architectures", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
_RENORMALISED = {True: 1, False: 0}


def check_engine_config(exported: dict[str, Any], arch: Architecture, source: dict[str, Any]) -> None:
    """Check config.json of a TensorRT-LLM checkpoint against the source.

    Raises:
        BuildError: A field differs. The message names the field.
    """
    expected: dict[str, Any] = {
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_size": arch.head_dim,
        "max_position_embeddings": arch.max_position_embeddings,
        "qk_layernorm": arch.qk_norm,
        **_rope_and_norm(source),
    }
    if arch.moe is not None:
        expected |= {"moe.num_experts": arch.moe.num_experts, "moe.top_k": arch.moe.experts_per_token}
        expected["moe_intermediate_size"] = arch.moe.moe_intermediate_size
        expected["moe.normalization_mode"] = _RENORMALISED[bool(source.get("norm_topk_prob", True))]
    _check_fields(exported, expected)


def _rope_and_norm(source: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of RoPE and norms, under the engine's names.

    The versions of transformers keep these settings in different places of config.json.
    """
    old = with_transformers4_keys(source)
    old = {**old, **old["text_config"]} if isinstance(old.get("text_config"), dict) else old
    names = {"norm_epsilon": "rms_norm_eps", "rotary_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    return {engine_name: old[hf_name] for engine_name, hf_name in names.items() if old.get(hf_name) is not None}


def check_hf_config(exported: dict[str, Any], source: dict[str, Any]) -> None:
    """Check every number and switch in config.json of a Hugging Face export against the source.

    TensorRT-LLM 1.2 reads the older spelling of a field, so the older spelling counts where both
    are present.
    """
    if "text_config" in source and "text_config" not in exported:  # the text part of a model with encoders
        source = source["text_config"]
    expected = {name: value for name, value in with_transformers4_keys(source).items() if name not in _IGNORED_FIELDS}
    _check_fields({**with_transformers4_keys(exported), **exported}, expected)


def _check_fields(exported: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        found = _get(exported, name)
        if not _same(found, value):
            raise BuildError(
                f"The exported config.json has {name} = {found!r}, and the source has {value!r}: a fault of the "
                "export, and no loss by quantisation. Build again, and report this if it fails again."
            )


def _get(config: dict[str, Any], name: str) -> Any:
    first, _, rest = name.partition(".")
    value = config.get(first)
    return _get(value, rest) if rest and isinstance(value, dict) else value


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and isinstance(found, dict):
        return all(_same(found.get(key), value) for key, value in expected.items())
    if isinstance(expected, float) or isinstance(found, float):
        return isinstance(found, int | float) and isinstance(expected, int | float) and _close(found, expected)
    return bool(found == expected)


def _close(found: float, expected: float) -> bool:
    return abs(found - expected) <= 1e-6 * abs(expected)
