"""CPU time that the engine model spends on TensorRT-LLM's KV-cache events and statistics.

Goals: at most 1 µs per prompt token whose block is stored and later removed, and at most 1 % of a
core for the readers while there is nothing to read. A stand-in replaces the library, whose own CPU
time is not included.
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

BLOCK_TOKENS, BLOCKS = 32, 2000
ARGUMENTS = {
    "backend": "pytorch",
    "enable_iter_perf_stats": True,
    "kv_cache_config": {"event_buffer_max_size": 65536, "tokens_per_block": BLOCK_TOKENS},
}
#: Seconds over which the CPU time of idle readers is measured: many reads of each reader.
IDLE = 5.0
CONDITIONS = "KV-cache events and statistics of TensorRT-LLM, which a stand-in replaces."


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`. `engine` is not used."""
    with tempfile.TemporaryDirectory() as folder:
        copy_model_code("tensorrt_llm", Path(folder))
        sys.path.insert(0, folder)
        runtimes = importlib.import_module("llmops_engine.runtimes.trtllm")
        translator = importlib.import_module("llmops_engine.kv_events").KvEventTranslator
        seconds = min(_events(translator) for _ in range(10))
        section.add("both, per prompt token", 1e6 * seconds / BLOCK_TOKENS, "µs/token", 1.0)
        section.add("readers while there is nothing to read", 100 * _idle_readers(runtimes), "% of a core", 1.0)


def _events(translator: Any) -> float:
    """Return the CPU seconds per block that is stored and removed, in prompts of 64 blocks."""
    tokens = np.random.default_rng(1).integers(0, 100_000, (BLOCKS, BLOCK_TOKENS)).tolist()
    stored = [
        {"event_id": at, "data": {"type": "stored", "parent_hash": at - 1 if at % 64 else None, "blocks": [
            {"block_hash": at, "tokens": [{"token_id": token} for token in block]}
        ]}}
        for at, block in enumerate(tokens, 1_000_000 * 64)
    ]  # fmt: skip
    names = [event["data"]["blocks"][0]["block_hash"] for event in stored]  # type: ignore[index]
    removed = [{"event_id": name + BLOCKS, "data": {"type": "removed", "block_hashes": [name]}} for name in names]
    made = translator(BLOCK_TOKENS)
    begun = time.process_time()
    changes, gone = made.translate(stored), made.translate(removed)
    end = time.process_time()
    assert len(changes) == len(gone) == BLOCKS
    return (end - begun) / BLOCKS


def _idle_readers(runtimes: Any) -> float:
    """Return the average number of cores that readers use while there is nothing to read."""
    profiles = [one.as_json() for one in profiles_per_release(ARGUMENTS)]
    options = runtimes.TrtllmOptions("model", "tokenizer", profiles, 4, end_ids=(99,))
    runtime = runtimes.TrtllmRuntime(options, library=standin.api("1.2.1"))
    try:
        runtime._start_readers()
        time.sleep(1.0)
        begun, before = time.monotonic(), time.process_time()
        time.sleep(IDLE)
        return (time.process_time() - before) / (time.monotonic() - begun)
    finally:
        runtime.close()
