"""Files that NVIDIA's C++ backend reads beside an engine.

These are the tokenizer's facts for grammars, and LoRA adapters.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.lora_adapters import CONFIG, MODULES, TENSOR, WEIGHTS, AdapterCheckpoint
from llmops.build.model.architecture import Architecture

TOKENIZER_INFO = "xgrammar_tokenizer_info.json"


def tokenizer_info(tokenizer_json: Path, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the content of xgrammar_tokenizer_info.json.

    The backend uses this file to hold output to a grammar.

    Format: NVIDIA/TensorRT-LLM `examples/generate_xgrammar_tokenizer_info.py`
    (`_xgrammar_tokenizer_info` of `tensorrt_llm/llmapi/tokenizer.py`): `encoded_vocab`, the token
    texts by id as the vocabulary spells them; `tokenizer_str`, the whole tokenizer.json;
    `stop_token_ids`, which may follow a complete text. An id that the vocabulary leaves out gets an
    empty text, so that positions stay ids.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = [""] * (max(vocabulary.values()) + 1)
    for text, token_id in vocabulary.items():
        texts[token_id] = text
    return {"encoded_vocab": texts, "tokenizer_str": tokenizer.to_str(), "stop_token_ids": list(stop_token_ids)}


def write_tokenizer_info(engine: Path, tokenizer_dir: str, stop_token_ids: Sequence[int]) -> None:
    """Write the file beside engine.json. `tokenizer_dir` is relative to the engine folder."""
    info = tokenizer_info(engine / tokenizer_dir / "tokenizer.json", stop_token_ids)
    (engine / TOKENIZER_INFO).write_text(json.dumps(info))


#: tensorrt_llm/lora_manager.py, LoraManager.LORA_MODULE_IDS.
MODULE_IDS = {
    "attn_qkv": 0, "attn_q": 1, "attn_k": 2, "attn_v": 3, "attn_dense": 4, "mlp_h_to_4h": 5, "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}  # fmt: skip
FOLDER, PREFETCH = "lora", "lora_prefetch"
#: The modules of which an engine takes all if it takes one. Of attention's it has inputs for all
#: three (1.2.1 `tensorrt_llm/layers/attention.py`, "all enabled or all disabled"), which the runtime
#: fills for the named ones only; an adapter of the MLP's first matrices it ignores unless both are
#: named (`layers/mlp.py`, fc_gate_lora).
_TOGETHER = (("attn_q", "attn_k", "attn_v"), ("mlp_h_to_4h", "mlp_gate"))


def engine_modules(adapters: Sequence[AdapterCheckpoint], more: Sequence[str]) -> list[str]:
    """Return the LoRA modules that an engine needs for the adapters and for `more` modules."""
    named = {module: None for adapter in adapters for module in adapter.modules}
    if "attn_qkv" in named:
        named = {"attn_q" if module == "attn_qkv" else module: None for module in named}
    named |= dict.fromkeys(more)
    for modules in _TOGETHER:
        if not named.keys().isdisjoint(modules):
            named |= dict.fromkeys(modules)
    return list(named)


def copy_adapters(adapters: list[AdapterCheckpoint], engine: Path) -> None:
    """Copy adapters to `lora/NAME/` in the engine folder, the path that `LoRARequest` gets."""
    for adapter in adapters:
        place = engine / FOLDER / adapter.name
        place.mkdir(parents=True)
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(adapter.folder / name, place / name)


def write_prefetch(
    adapters: list[AdapterCheckpoint], engine: Path, arch: Architecture, tp: int
) -> tuple[int, list[list[tuple[int, int, int]]]]:
    """Write adapters as `lora_prefetch_dir` of the backend.

    The files are `lora_prefetch/ID/model.lora_{weights,config}.npy`.

    Returns:
        The bytes of all weights, and of each adapter (module id, layer, rank) of each row.
    """
    import numpy as np

    size, rows = 0, []
    for adapter in adapters:
        place = engine / PREFETCH / str(adapter.task_id)
        place.mkdir(parents=True)
        weights, config = convert_adapter(adapter, arch, tp)
        np.save(place / "model.lora_weights.npy", weights)
        np.save(place / "model.lora_config.npy", config)
        size += weights.nbytes
        rows.append(config[0].tolist())
    return size, rows


def convert_adapter(adapter: AdapterCheckpoint, arch: Architecture, tp: int) -> tuple[Any, Any]:
    """Return weights FP16 [1, modules, longest row] and config INT32 [1, modules, 3] of an adapter.

    Format: NVIDIA/TensorRT-LLM `examples/hf_lora_convert.py` and `cpp/…/peftCacheManager.cpp`
    (prefetchLoraWeights). For each adapted module one row: A (rank, in) and B (out, rank),
    flattened one after the other, B scaled, float16 (their reader of .npy files knows no bfloat16);
    rows are padded to the longest. The config has (module id, layer, rank) of each row.
    """
    import numpy as np

    rows, config = [], []
    for (layer, module), (a, b) in sorted(_modules(adapter, arch, tp).items()):
        rows.append(np.concatenate([a.ravel(), (b * adapter.scale).ravel()]).astype(np.float16))
        config.append([MODULE_IDS[module], layer, adapter.rank])
    longest = max(row.size for row in rows)
    padded = np.stack([np.pad(row, (0, longest - row.size)) for row in rows])
    return padded[None], np.array([config], dtype=np.int32)


def _modules(adapter: AdapterCheckpoint, arch: Architecture, tp: int) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Return (layer, module) -> A (rank, in) and B (out, rank), float32, as the runtime cuts them.

    It gives each GPU the same number of B's rows, one after the other (`cpp/tensorrt_llm/runtime/
    loraCache.cpp`, copyToPages). So packed matrices become one module each, and with more GPUs than
    KV heads each GPU gets its copy of one (`loraModule.cpp`, createLoraModules).
    """
    import numpy as np

    heads, copies = arch.num_heads * arch.head_dim, max(1, tp // arch.num_kv_heads)
    found: dict[tuple[int, str], tuple[Any, Any]] = {}
    for (layer, name), (a, b) in _pairs(adapter).items():
        parts = {MODULES[name]: b}
        if name == "qkv_proj":
            parts = dict(zip(_TOGETHER[0], np.split(b, [heads, (heads + len(b)) // 2]), strict=True))
        elif name == "gate_up_proj":
            parts = dict(zip(_TOGETHER[1], np.split(b, 2), strict=True))
        for module, rows in parts.items():
            if module in ("attn_k", "attn_v"):
                rows = np.repeat(rows.reshape(arch.num_kv_heads, -1, adapter.rank), copies, axis=0).reshape(
                    -1, adapter.rank
                )
            found[layer, module] = a, rows
    return found


def _pairs(adapter: AdapterCheckpoint) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Return (layer, Hugging Face's module) -> A (rank, in) and B (out, rank), float32."""
    from safetensors.torch import load_file

    found: dict[tuple[int, str], dict[str, Any]] = {}
    for name, tensor in load_file(adapter.weights).items():
        match = TENSOR.fullmatch(name)
        assert match is not None  # read_adapters rejects other names
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.float().numpy()
    return {key: (pair["A"], pair["B"]) for key, pair in found.items()}
