"""Check that TensorRT-LLM's engines rotate positions as the model does."""

from collections.abc import Mapping
from typing import Any

from llmops.build.trtllm.container_images import DEFAULT_TAG
from llmops.errors import InputError


def check_rotary(config: Mapping[str, Any], family: str, quant: str, release: tuple[int, int]) -> None:
    """Raise InputError for a scaling of positions in config.json that an engine of the release lacks.

    Factors per dimension (longrope) are in Phi3Attention alone, not in LLaMA's class, and not in
    the attention of fp8_pc_pt (`tensorrt_llm/models/{phi3,llama}/model.py`,
    `tensorrt_llm/quantization/layers.py`, Fp8RowwiseAttention). Before 1.2, Gemma 3's scaling is
    applied to its local layers, too (`tensorrt_llm/layers/attention.py`, register_rope_params).
    """
    kind = _scaling_kind(config)
    if kind in ("longrope", "su") and family != "phi3":
        raise InputError(
            f"config.json has rope_type {kind}, which TensorRT-LLM's engines have for Phi-3 and 4 only; use --target "
            "pytorch."
        )
    if kind in ("longrope", "su") and quant == "fp8_pc_pt":
        raise InputError(
            f"config.json has rope_type {kind}, which engines in fp8_pc_pt do not have; use --quant fp8, or --target "
            "pytorch."
        )
    if kind and family == "gemma3" and release < (1, 2):
        raise InputError(
            f"TensorRT-LLM {'.'.join(map(str, release))} scales positions in this model's local layers, too; use --set "
            f"image={DEFAULT_TAG}."
        )


def _scaling_kind(config: Mapping[str, Any]) -> str | None:
    """Return the rope type of the global layers, or None if positions are not scaled.

    transformers 5 writes `rope_parameters`, by kind of layer for Gemma 3.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(found, Mapping) and isinstance(found.get("full_attention"), Mapping):
        found = found["full_attention"]
    kind = (found.get("rope_type") or found.get("type")) if isinstance(found, Mapping) else None
    return str(kind) if kind and kind != "default" else None
