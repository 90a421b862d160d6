"""Write the files that NVIDIA's C++ backend reads beside an engine.

The files have the vocabulary for grammars, and the LoRA adapters.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.file_checks import copy_checked
from llmops.build.checkpoint.lora_adapters import CONFIG, MODULES, TENSOR, WEIGHTS, AdapterCheckpoint
from llmops.build.model.architecture import Architecture

TOKENIZER_INFO = "xgrammar_tokenizer_info.json"


def tokenizer_info(tokenizer_json: Path, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the content of xgrammar_tokenizer_info.json.

    The backend uses this file to enforce grammars.

    Format: NVIDIA/TensorRT-LLM `examples/generate_xgrammar_tokenizer_info.py`
    (`_xgrammar_tokenizer_info` of `tensorrt_llm/llmapi/tokenizer.py`): `encoded_vocab` is the list
    of token texts by id, in the vocabulary's spelling, `tokenizer_str` the whole tokenizer.json,
    and `stop_token_ids` the ids that may follow a complete text. An id without a token gets an
    empty text, so that positions are ids.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = [""] * (max(vocabulary.values()) + 1)
    for text, token_id in vocabulary.items():
        texts[token_id] = text
    return {"encoded_vocab": texts, "tokenizer_str": tokenizer.to_str(), "stop_token_ids": list(stop_token_ids)}


def write_tokenizer_info(engine: Path, tokenizer_dir: str, stop_token_ids: Sequence[int]) -> None:
    """Write xgrammar_tokenizer_info.json beside engine.json.

    `tokenizer_dir` is a path relative to the engine folder.
    """
    info = tokenizer_info(engine / tokenizer_dir / "tokenizer.json", stop_token_ids)
    (engine / TOKENIZER_INFO).write_text(json.dumps(info))


#: Ids of LoRA modules, from tensorrt_llm/lora_manager.py, LoraManager.LORA_MODULE_IDS.
MODULE_IDS = {
    "attn_qkv": 0, "attn_q": 1, "attn_k": 2, "attn_v": 3, "attn_dense": 4, "mlp_h_to_4h": 5, "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}  # fmt: skip
FOLDER, PREFETCH = "lora", "lora_prefetch"
#: Groups of modules that an engine has together. For attention, an engine has inputs for all three
#: modules (1.2.1 `tensorrt_llm/layers/attention.py`, "all enabled or all disabled"), and the
#: runtime fills only the inputs of named modules. An engine ignores an adapter of the MLP's first
#: matrices unless both are named (`layers/mlp.py`, fc_gate_lora).
_TOGETHER = (("attn_q", "attn_k", "attn_v"), ("mlp_h_to_4h", "mlp_gate"))


def engine_modules(adapters: Sequence[AdapterCheckpoint], more: Sequence[str]) -> list[str]:
    """Return the LoRA modules that an engine needs for the adapters and for the modules `more`."""
    named = {module: None for adapter in adapters for module in adapter.modules}
    if "attn_qkv" in named:
        named = {"attn_q" if module == "attn_qkv" else module: None for module in named}
    named |= dict.fromkeys(more)
    for modules in _TOGETHER:
        if not named.keys().isdisjoint(modules):
            named |= dict.fromkeys(modules)
    return list(named)


def copy_adapters(adapters: list[AdapterCheckpoint], engine: Path) -> None:
    """Copy adapters to `lora/NAME/` in the engine folder, from which `LoRARequest` reads them."""
    for adapter in adapters:
        place = engine / FOLDER / adapter.name
        place.mkdir(parents=True)
        for name in (CONFIG, WEIGHTS):
            copy_checked(adapter.folder / name, place / name)


def write_prefetch(
    adapters: list[AdapterCheckpoint], engine: Path, arch: Architecture, tp: int
) -> tuple[int, list[list[tuple[int, int, int]]]]:
    """Write adapters into the folder that becomes `lora_prefetch_dir` of the backend.

    The files are `lora_prefetch/ID/model.lora_{weights,config}.npy`.

    Returns:
        The bytes of all weights, and the `Rows` of each adapter.
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
    """Return an adapter as FP16 [1, modules, longest row], with its INT32 config [1, modules, 3].

    Format: NVIDIA/TensorRT-LLM `examples/hf_lora_convert.py` and `cpp/…/peftCacheManager.cpp`
    (prefetchLoraWeights). Each adapted module has a row: A (rank, in) and the scaled B (out, rank),
    flattened one after the other, in float16, because NVIDIA's reader of .npy files does not
    support bfloat16. Rows are padded to the longest row. The config has module id, layer and rank
    of each row.
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
    """Return A (rank, in) and B (out, rank) of each layer and module, as the runtime splits them.

    The runtime gives each GPU the same number of B's rows, one after the other
    (`cpp/tensorrt_llm/runtime/loraCache.cpp`, copyToPages). So packed matrices become one module
    each, and with more GPUs than KV heads, each GPU gets a copy of a head (`loraModule.cpp`,
    createLoraModules).
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
    """Return A (rank, in) and B (out, rank) of each layer and Hugging Face module, in float32."""
    from safetensors.torch import load_file

    found: dict[tuple[int, str], dict[str, Any]] = {}
    for name, tensor in load_file(adapter.weights).items():
        match = TENSOR.fullmatch(name)
        assert match is not None  # `read_adapters` has rejected other names.
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.float().numpy()
    return {key: (pair["A"], pair["B"]) for key, pair in found.items()}
