"""The C++ backend's cache of adapters has room for all that load as the model starts.

NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/peftCacheManager.cpp (0cedd9a0400c) and cpp/tensorrt_llm/runtime/
loraCache.cpp (063e02f73410), loraModule.cpp (2a9abd9536aa).
"""

import math

import pytest

from llmops.build.trtllm.adapter_cache import cache_parameters
from tests.plan.published_shapes import LLAMA31_8B as SMALL
from tests.plan.published_shapes import LLAMA31_70B as LARGE

ALL = ["attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"]
IDS = dict(zip(ALL, (1, 2, 3, 4, 5, 6, 7), strict=True))


def adapter(arch, modules, rank):
    return [(IDS[module], layer, rank) for layer in range(arch.num_layers) for module in modules]


class HostCache:
    """PeftCacheManager's constructor with a prefetch folder, as one GPU (tp 1) of one pipeline stage runs it."""

    def __init__(self, arch, modules, max_rank, parameters, first, layers):
        optimal = min(int(parameters.get("lora_cache_optimal_adapter_size", 8)), max_rank)
        largest = min(int(parameters.get("lora_cache_max_adapter_size", 64)), max_rank)
        host = int(parameters.get("lora_cache_host_memory_bytes", 1 << 30))
        hidden, mlp, q, kv = arch.hidden_size, arch.intermediate_size, arch.num_heads * 128, arch.num_kv_heads * 128
        both = {"attn_q": (hidden, q), "attn_k": (hidden, kv), "attn_v": (hidden, kv), "attn_dense": (hidden, hidden),
                "mlp_h_to_4h": (hidden, mlp), "mlp_4h_to_h": (mlp, hidden), "mlp_gate": (hidden, mlp)}  # fmt: skip
        self.one = {IDS[module]: sum(both[module]) for module in modules}
        self.width = min(self.one.values())
        total = sum(optimal * math.ceil(one / self.width) for one in self.one.values()) * layers
        self.page = max(total, math.ceil(largest * max(self.one.values()) / self.width))
        slots = host // (self.width * 2)
        if slots < math.ceil(largest * sum(self.one.values()) * layers / self.width):
            raise RuntimeError("Not enough space allocated to host LoRA cache to hold 1 max sized LoRA")
        self.largest, self.free, self.layers = largest, math.ceil(slots / self.page), range(first, first + layers)

    def put(self, rows):
        current, slot = 0, 0
        for module, layer, rank in rows:
            if layer in self.layers:
                needed = math.ceil(rank * self.one[module] / self.width)
                if needed + slot > self.page:
                    slot, current = 0, current + 1
                slot += needed
        self.free -= current + 1
        if self.free < 0:
            raise RuntimeError("Cache is full. There are no done tasks to evict")


def start(arch, modules, max_rank, adapters, parameters, pp=1):
    caches = []
    for first in range(0, arch.num_layers, arch.num_layers // pp):
        cache = HostCache(arch, modules, max_rank, parameters, first, arch.num_layers // pp)
        for rows in adapters:
            cache.put(rows)
        caches.append(cache)
    return caches


@pytest.mark.parametrize("pp", [1, 2])
def test_many_adapters_of_few_modules_beside_one_of_all(pp):
    """Each takes a page of rank 8 of every module, 42 MB, for its own 7 MB."""
    few = [adapter(SMALL, ["attn_q", "attn_v"], 8) for _ in range(60)]
    adapters = [adapter(SMALL, ALL, 16), *few]
    with pytest.raises(RuntimeError, match="Cache is full"):
        start(SMALL, ALL, 16, adapters, {}, pp)
    given = cache_parameters(adapters, SMALL, (1, pp), ALL, 16, {})
    (room,) = given.values()
    caches = start(SMALL, ALL, 16, adapters, given, pp)
    assert [cache.free for cache in caches] == [0] * pp
    assert int(room) == caches[0].page * caches[0].width * 2 * 62


@pytest.mark.parametrize("adapters", [[], [adapter(LARGE, ["attn_q"], 64), adapter(LARGE, ALL, 4)]])
def test_an_engine_has_room_for_the_largest_adapter_that_it_takes(adapters):
    """An adapter of all modules in rank 64 takes 1.6 GB, whatever the adapters are that load at the start."""
    with pytest.raises(RuntimeError, match="1 max sized LoRA"):
        start(LARGE, ALL, 64, adapters, {})
    given = cache_parameters(adapters, LARGE, (1, 1), ALL, 64, {})
    assert list(given) == ["lora_cache_host_memory_bytes"]
    start(LARGE, ALL, 64, adapters, given)


def test_adapters_above_the_backends_largest_rank():
    """The backend otherwise starts with a GPU cache too small for one, whose requests would wait for ever."""
    adapters = [adapter(SMALL, ALL, 128)]
    given = cache_parameters(adapters, SMALL, (1, 1), ALL, 128, {})
    assert given["lora_cache_max_adapter_size"] == "128"
    assert start(SMALL, ALL, 128, adapters, given)[0].largest == 128


def test_defaults_with_room_and_the_users_own_sizes_stay():
    adapters = [adapter(SMALL, ALL, 8)]
    assert cache_parameters(adapters, SMALL, (1, 1), ALL, 8, {}) == {}
    chosen = {"lora_cache_max_adapter_size": "32", "lora_cache_host_memory_bytes": "5"}
    assert cache_parameters([adapter(LARGE, ALL, 128)], LARGE, (1, 1), ALL, 128, chosen) == {}
