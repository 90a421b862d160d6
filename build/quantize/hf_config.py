"""Write config.json of a quantised Hugging Face checkpoint in the spelling of transformers 4.

TensorRT-LLM 1.2 has transformers 4.57, which reads `rope_theta`, `rope_scaling` and `torch_dtype`.
transformers 5 writes `rope_parameters` and `dtype` instead. From such a file, 4.57 would silently
rotate a Llama 3 with theta 10000.
"""

import json
from pathlib import Path
from typing import Any

_BOOKKEEPING = ("training_tensor_parallel", "training_pipeline_parallel")


def with_transformers4_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with transformers 4's keys added. Keys that both versions know stay."""
    old = {key: value for key, value in config.items() if key not in _BOOKKEEPING}
    if "dtype" in old:
        old["torch_dtype"] = old["dtype"]
    if "num_local_experts" in old and str(old.get("model_type", "")).startswith("qwen3_moe"):
        old["num_experts"] = old["num_local_experts"]
    parameters = old.get("rope_parameters")
    if isinstance(parameters, dict):
        old.update(_rope(parameters))
        if old.get("model_type") == "phi3" and old["rope_scaling"]:
            old.update(_phi3(old["rope_scaling"]))
    if isinstance(old.get("text_config"), dict):
        old["text_config"] = with_transformers4_keys(old["text_config"])
    return old


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    if "full_attention" in parameters:
        local = parameters.get("sliding_attention", {})
        fields = _rope(parameters["full_attention"])
        return {**fields, "rope_local_base_freq": local.get("rope_theta", 10000.0)}
    rest = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    fields = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    scaled = rest.get("rope_type", "default") != "default"
    return {**fields, "rope_scaling": {**rest, "type": rest["rope_type"]} if scaled else None}


def _phi3(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Phi-3's RoPE scaling. transformers 4.57 allows only three fields."""
    names = ("type", "short_factor", "long_factor")
    beside = {key: value for key, value in scaling.items() if key == "original_max_position_embeddings"}
    return {**beside, "rope_scaling": {key: scaling[key] for key in names if key in scaling}}


def rewrite_config(folder: Path, dtype: str) -> None:
    """Rewrite `folder`/config.json in the older spelling.

    `dtype` is the dtype of unquantised weights.
    """
    path = folder / "config.json"
    config = with_transformers4_keys(json.loads(path.read_text()))
    config["dtype"] = config["torch_dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
