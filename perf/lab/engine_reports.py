"""CPU that the engine model spends on TensorRT-LLM's KV-cache events and statistics.

Goals: 1 µs per prompt token whose block is stored and later removed, and 1 % of a core for the
readers while there is nothing to read. The library is a stand-in, so its own part is not included.
"""

import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from llmops.build.trtllm.release_profiles import profiles_per_release
from llmops.model_repository.generate import copy_model_code
from llmops.perf.lab.figures import Section
from tests.trtllm import standin

BLOCK_TOKENS, BLOCKS, STEPS = 32, 2000, 10_000
ARGUMENTS = {
    "backend": "pytorch",
    "enable_iter_perf_stats": True,
    "kv_cache_config": {"event_buffer_max_size": 65536, "tokens_per_block": BLOCK_TOKENS},
}
#: Seconds for which the idle readers are watched.
IDLE = 5.0
CONDITIONS = "KV-cache events and statistics of TensorRT-LLM, whose part is a stand-in."


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark. It needs no engine."""
    with tempfile.TemporaryDirectory() as folder:
        copy_model_code("tensorrt_llm", Path(folder))
        sys.path.insert(0, folder)
        runtimes = importlib.import_module("llmops_engine.runtimes.trtllm")
        translator = importlib.import_module("llmops_engine.kv_events").KvEventTranslator
        stored, removed = min(_events(translator) for _ in range(10))
        section.add("KV event, stored block of 32 tokens", 1e6 * stored, "µs")
        section.add("KV event, removed block", 1e6 * removed, "µs")
        section.add("both, per prompt token", 1e6 * (stored + removed) / BLOCK_TOKENS, "µs/token", 1.0)
        statistics, idle = _readers(runtimes)
        section.add("statistics of a step", 1e6 * statistics, "µs")
        section.add("readers while there is nothing to read", 100 * idle, "% of a core", 1.0)


def _events(translator: Any) -> tuple[float, float]:
    """Return the CPU seconds per stored and per removed block, in prompts of 64 blocks."""
    tokens = np.random.default_rng(1).integers(0, 100_000, (BLOCKS, BLOCK_TOKENS)).tolist()
    stored = [
        {"data": {"type": "stored", "parent_hash": at - 1 if at % 64 else None, "blocks": [
            {"block_hash": at, "tokens": [{"token_id": token} for token in block]}
        ]}}
        for at, block in enumerate(tokens, 1_000_000 * 64)
    ]  # fmt: skip
    names = [event["data"]["blocks"][0]["block_hash"] for event in stored]  # type: ignore[index]
    removed = [{"data": {"type": "removed", "block_hashes": [name]}} for name in names]
    made = translator(BLOCK_TOKENS)
    begun = time.process_time()
    changes = made.translate(stored)
    middle = time.process_time()
    gone = made.translate(removed)
    end = time.process_time()
    assert len(changes) == len(gone) == BLOCKS
    return (middle - begun) / BLOCKS, (end - middle) / BLOCKS


def _readers(runtimes: Any) -> tuple[float, float]:
    """Return the CPU seconds per step's statistics, and the cores that idle readers use."""
    profiles = [one.as_json() for one in profiles_per_release(ARGUMENTS)]
    options = runtimes.TrtllmOptions("model", "tokenizer", profiles, 4, end_ids=(99,))
    runtime = runtimes.TrtllmRuntime(options, library=standin.api("1.2.1"))
    try:
        entries = standin.LLM.made[-1]
        for _ in range(STEPS):
            entries.iterate()
        read = entries.get_stats(0)
        begun = time.process_time()
        runtime._keep_stats(read)
        each = (time.process_time() - begun) / STEPS
        runtime._start_readers()
        time.sleep(1.0)
        begun, before = time.monotonic(), time.process_time()
        time.sleep(IDLE)
        return each, (time.process_time() - before) / (time.monotonic() - begun)
    finally:
        runtime.close()
