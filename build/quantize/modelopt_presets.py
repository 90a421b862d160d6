"""A format -> ModelOpt 0.47 `quant_cfg`, whose entries are a list applied from first to last."""

from __future__ import annotations

import copy
from typing import Any

from llmops.build.quant_formats import QuantFormat


def modelopt_config(form: QuantFormat, kv_cache: str, group_size: int | None) -> dict[str, Any] | None:
    """What `mtq.quantize` takes; None where nothing is quantised before the export."""
    import modelopt.torch.quantization as mtq

    entries = _kv_entries(kv_cache)
    if form.preset is None:
        return (
            {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *entries], "algorithm": "max"} if entries else None
        )
    config: dict[str, Any] = copy.deepcopy(getattr(mtq, form.preset))
    if group_size is not None:
        _set_group_size(config, group_size)
    config["quant_cfg"] = [*config["quant_cfg"], *entries]
    return config


def _set_group_size(config: dict[str, Any], group_size: int) -> None:
    for entry in config["quant_cfg"]:
        cfg = entry.get("cfg")
        for part in cfg if isinstance(cfg, list) else [cfg]:
            if part and "block_sizes" in part:
                part["block_sizes"][-1] = group_size


def _kv_entries(kv_cache: str) -> list[dict[str, Any]]:
    import modelopt.torch.quantization as mtq

    if kv_cache == "fp8":
        return copy.deepcopy(list(mtq.FP8_KV_CFG["quant_cfg"]))
    if kv_cache == "int8":
        return [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": 8, "axis": None}, "enable": True}]
    return []
