"""Recognises how a checkpoint is quantised already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmops.build.checkpoint.description import ExistingQuantisation
from llmops.build.checkpoint.json_file import read_json
from llmops.errors import CheckpointError

MODELOPT_FILE = "hf_quant_config.json"
_BITS = {"fp8": 8, "awq": 4, "gptq": 4, "mxfp4": 4}


def detect_quantisation(folder: Path, config: dict[str, Any]) -> ExistingQuantisation | None:
    """From config.json's `quantization_config`, or ModelOpt's hf_quant_config.json. None: full precision."""
    modelopt = folder / MODELOPT_FILE
    if modelopt.is_file():
        return _modelopt(modelopt)
    quantised = config.get("quantization_config")
    if not isinstance(quantised, dict):
        return None
    method = str(quantised.get("quant_method", "other")).lower()
    known = method in ("fp8", "awq", "gptq", "compressed-tensors", "modelopt", "bitsandbytes", "mxfp4")
    return ExistingQuantisation(
        method=method if known else "other",  # type: ignore[arg-type]  # narrowed by `known`
        bits=_bits(method, quantised),
        detail=quantised,
    )


def _modelopt(path: Path) -> ExistingQuantisation:
    content = read_json(path)
    # ModelOpt 1.x writes the fields themselves, without the object around them
    detail = content if "quantization" not in content and "quant_algo" in content else content.get("quantization", {})
    if not isinstance(detail, dict):
        raise CheckpointError(f"{path} has no object `quantization`; export the checkpoint again.")
    algorithm = str(detail.get("quant_algo") or "")
    bits = 4 if algorithm.startswith(("W4", "NVFP4")) else 8 if algorithm else None
    return ExistingQuantisation("modelopt", bits, detail)


def _bits(method: str, quantised: dict[str, Any]) -> int | None:
    for field in ("bits", "w_bit"):
        if isinstance(quantised.get(field), int):
            return int(quantised[field])
    if method == "bitsandbytes":
        return 4 if quantised.get("load_in_4bit") else 8
    if method == "compressed-tensors":
        groups = quantised.get("config_groups") or {}
        bits = [(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, dict)]
        return min((b for b in bits if isinstance(b, int)), default=None)
    return _BITS.get(method)
