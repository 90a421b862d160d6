"""Adapters in the form that the C++ backend loads: `lora_prefetch_dir` with a folder per task id.

Format: NVIDIA/TensorRT-LLM `examples/hf_lora_convert.py` and `cpp/…/peftCacheManager.cpp` (prefetchLoraWeights). For
each adapted module one row: A (rank, in) and B (out, rank), flattened one after the other, B scaled, float16 (their
reader of .npy files knows no bfloat16); rows are padded to the longest. `model.lora_config.npy` INT32 [1, modules, 3]
has (module id, layer, rank) of each row.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.lora_adapters import CONFIG, MODULES, TENSOR, WEIGHTS, AdapterCheckpoint

# tensorrt_llm/lora_manager.py, LoraManager.LORA_MODULE_IDS
MODULE_IDS = {
    "attn_qkv": 0, "attn_q": 1, "attn_k": 2, "attn_v": 3, "attn_dense": 4, "mlp_h_to_4h": 5, "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}  # fmt: skip
FOLDER, PREFETCH = "lora", "lora_prefetch"


def copy_adapters(adapters: list[AdapterCheckpoint], engine: Path) -> None:
    """`lora/NAME/` in the engine folder: what `LoRARequest` is given."""
    for adapter in adapters:
        place = engine / FOLDER / adapter.name
        place.mkdir(parents=True)
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(adapter.folder / name, place / name)


def write_prefetch(adapters: list[AdapterCheckpoint], engine: Path) -> int:
    """`lora_prefetch/ID/model.lora_{weights,config}.npy`. Returns the bytes of all weights, for the host cache."""
    import numpy as np

    size = 0
    for adapter in adapters:
        place = engine / PREFETCH / str(adapter.task_id)
        place.mkdir(parents=True)
        weights, config = convert_adapter(adapter)
        np.save(place / "model.lora_weights.npy", weights)
        np.save(place / "model.lora_config.npy", config)
        size += weights.nbytes
    return size


def convert_adapter(adapter: AdapterCheckpoint) -> tuple[Any, Any]:
    """(weights FP16 [1, modules, longest row], config INT32 [1, modules, 3])."""
    import numpy as np

    rows, config = [], []
    for (layer, module), (a, b) in sorted(_pairs(adapter).items()):
        rows.append(np.concatenate([a.ravel(), (b * adapter.scale).ravel()]).astype(np.float16))
        config.append([MODULE_IDS[MODULES[module]], layer, adapter.rank])
    longest = max(row.size for row in rows)
    padded = np.stack([np.pad(row, (0, longest - row.size)) for row in rows])
    return padded[None], np.array([config], dtype=np.int32)


def _pairs(adapter: AdapterCheckpoint) -> dict[tuple[int, str], tuple[Any, Any]]:
    """(layer, module) -> A (rank, in) and B (out, rank), float32."""
    import numpy as np
    from safetensors.torch import load_file

    found: dict[tuple[int, str], dict[str, Any]] = {}
    for name, tensor in load_file(adapter.weights).items():
        match = TENSOR.fullmatch(name)
        assert match is not None  # read_adapters let it through
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.float().numpy()
    for (_, module), pair in found.items():
        if module == "gate_up_proj":  # the engine has up before gate
            first, second = np.split(pair["B"], 2)
            pair["B"] = np.concatenate([second, first])
    return {key: (pair["A"], pair["B"]) for key, pair in found.items()}
