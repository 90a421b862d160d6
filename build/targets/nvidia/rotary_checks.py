"""Check that TensorRT-LLM's engines rotate positions like the model."""

from collections.abc import Mapping
from typing import Any

from llmops.build.trtllm.container_images import DEFAULT_TAG
from llmops.errors import InputError


def check_rotary(config: Mapping[str, Any], family: str, quant: str, release: tuple[int, int]) -> None:
    """Raise InputError for a RoPE scaling in config.json that engines of the release lack.

    Only Phi3Attention has factors per dimension (longrope). LLaMA's class and the attention of
    fp8_pc_pt have none (`tensorrt_llm/models/{phi3,llama}/model.py`,
    `tensorrt_llm/quantization/layers.py`, Fp8RowwiseAttention). Before 1.2, the scaling of Gemma 3
    is applied to local layers too (`tensorrt_llm/layers/attention.py`, register_rope_params).
    """
    kind = _scaling_kind(config)
    if kind in ("longrope", "su") and family != "phi3":
        raise InputError(
            f"config.json has rope_type {kind}, which TensorRT-LLM's engines have only for Phi-3 and Phi-4; use "
            "--target "
            "pytorch."
        )
    if kind in ("longrope", "su") and quant == "fp8_pc_pt":
        raise InputError(
            f"config.json has rope_type {kind}, which engines in fp8_pc_pt do not have; use --quant fp8, or --target "
            "pytorch."
        )
    if kind and family == "gemma3" and release < (1, 2):
        raise InputError(
            f"TensorRT-LLM {'.'.join(map(str, release))} scales positions in this model's local layers, too, so the "
            f"engine would compute other answers than the model; use --set image={DEFAULT_TAG}."
        )


def _scaling_kind(config: Mapping[str, Any]) -> str | None:
    """Return the rope type of the global layers, or None if positions are not scaled.

    transformers 5 writes `rope_parameters`, and for Gemma 3 one per kind of layer.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(found, Mapping) and isinstance(found.get("full_attention"), Mapping):
        found = found["full_attention"]
    kind = (found.get("rope_type") or found.get("type")) if isinstance(found, Mapping) else None
    return str(kind) if kind and kind != "default" else None
