"""Compute the memory in which NVIDIA's C++ backend keeps the adapters of an engine.

Source: NVIDIA/TensorRT-LLM `cpp/tensorrt_llm/batch_manager/peftCacheManager.cpp`
(getPageManagerConfig), `runtime/loraCache.cpp` (determineNumPages) and `runtime/loraModule.cpp`
(createLoraModules). The cache has pages, and two adapters never share a page. A page holds rank
`optimal_adapter_size` of every module of every layer, so an adapter of few modules leaves most of
its pages empty. If no page is free for an adapter at the start of the model, the start fails.
"""

from collections.abc import Mapping, Sequence

from llmops.build.model.architecture import Architecture
from llmops.build.trtllm.backend_files import MODULE_IDS

#: The backend's default of lora_cache_host_memory_bytes.
HOST_MEMORY = 1 << 30
#: The backend's default of lora_cache_max_adapter_size, a rank.
MAX_ADAPTER_SIZE = 64
#: The backend's default of lora_cache_optimal_adapter_size, a rank.
OPTIMAL_ADAPTER_SIZE = 8
_HOST, _MAX, _OPTIMAL = (
    "lora_cache_host_memory_bytes",
    "lora_cache_max_adapter_size",
    "lora_cache_optimal_adapter_size",
)

#: Module id, layer and rank of each pair of matrices of an adapter, in the order of the adapter's
#: file.
Rows = Sequence[tuple[int, int, int]]


def cache_parameters(
    adapters: Sequence[Rows],
    arch: Architecture,
    gpus: tuple[int, int],
    modules: Sequence[str],
    max_rank: int,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Return the backend's parameters whose defaults have no room for all adapters.

    Args:
        adapters: The adapters that the backend loads at the start of the model.
        arch: The base model's architecture.
        gpus: The sizes tp and pp.
        modules: The LoRA modules of the engine.
        max_rank: The maximum rank of an adapter in the engine.
        given: Parameters that the user chose, which are not returned.
    """
    largest = min(int(given.get(_MAX, max(max_rank, MAX_ADAPTER_SIZE))), max_rank)
    usual = min(int(given.get(_OPTIMAL, OPTIMAL_ADAPTER_SIZE)), max_rank)
    sizes = _sizes(arch, gpus[0], modules)
    width, layers = min(sizes.values()), -(-arch.num_layers // gpus[1])
    page = max(
        usual * sum(-(-size // width) for size in sizes.values()) * layers, -(-largest * max(sizes.values()) // width)
    )
    pages = max(
        sum(_pages(rows, range(first, first + layers), sizes, width, page) for rows in adapters)
        for first in range(0, arch.num_layers, layers)
    )
    one = -(-largest * sum(sizes.values()) * layers // width)
    room = max(pages * page, one) * width * 2
    found = {}
    if max_rank > MAX_ADAPTER_SIZE:
        found[_MAX] = str(max_rank)
    if room > HOST_MEMORY:
        found[_HOST] = str(room)
    return {name: value for name, value in found.items() if name not in given}


def _sizes(arch: Architecture, tp: int, modules: Sequence[str]) -> dict[int, int]:
    """Return the number of values of A and B of rank 1 on one of `tp` GPUs, by module id."""
    hidden, ffn, heads = arch.hidden_size, arch.intermediate_size // tp, arch.num_heads // tp * arch.head_dim
    kv = max(arch.num_kv_heads // tp, 1) * arch.head_dim
    sizes = {
        "attn_qkv": hidden + heads + 2 * kv, "attn_q": hidden + heads, "attn_k": hidden + kv, "attn_v": hidden + kv,
        "attn_dense": hidden // tp + hidden, "mlp_h_to_4h": hidden + ffn, "mlp_4h_to_h": ffn + hidden,
        "mlp_gate": hidden + ffn,
    }  # fmt: skip
    return {MODULE_IDS[module]: sizes[module] for module in modules}


def _pages(rows: Rows, layers: range, sizes: Mapping[int, int], width: int, page: int) -> int:
    """Return the number of cache pages of an adapter. A pair of matrices lies within one page.

    Args:
        rows: The module id, layer and rank of each pair.
        layers: The layers that one GPU has.
        sizes: The number of values of a pair of rank 1, by module id.
        width: The number of values of a row of a page.
        page: The number of rows of a page.
    """
    pages, used = 1, 0
    for module, layer, rank in rows:
        if layer in layers:
            slots = -(-rank * sizes[module] // width)
            if used + slots > page:
                pages, used = pages + 1, 0
            used += slots
    return pages
