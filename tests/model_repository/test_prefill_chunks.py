"""Long prompts are read in chunks that let running answers keep their pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmops_engine.request import RuntimeRequest
from llmops_engine.runtimes.chunk_size import MeasuredStep, largest_chunk

#: CPU milliseconds of SmolLM2-135M on two cores: the first and the last chunk of a prompt of 4,000 tokens, in chunks
#: of 256, 64, 16 and 4 tokens.
MEASURED = [(256, 250, 100), (256, 3750, 251), (64, 250, 39), (64, 3750, 90), (16, 250, 26), (16, 3750, 55)]


@pytest.mark.parametrize(
    ("objective", "least", "chunk"),
    [(1.0, 1, 256), (0.2, 1, 128), (0.1, 1, 64), (0.06, 1, 32), (0.001, 1, 32), (0.001, 100, 128), (0.001, 300, 256)],
)
def test_the_chunk_is_the_largest_whose_mean_step_keeps_the_objective(objective, least, chunk):
    steps = [MeasuredStep(tokens, depth, ms / 1000) for tokens, depth, ms in MEASURED]
    assert largest_chunk(steps, objective, 8192, 256, least) == chunk


@pytest.mark.parametrize(("step_seconds", "chunk"), [(None, 512), (1e-6, 32)])
def test_an_engine_measures_its_chunk_and_counts_down_what_is_left_of_a_prompt(
    engine_dir: Path, step_seconds: float | None, chunk: int
) -> None:
    openvino: Any = pytest.importorskip("llmops_engine.runtimes.openvino")
    own = json.loads((engine_dir / "engine.json").read_text())["extra"]["openvino"]
    options = openvino.OpenVINOOptions(
        engine_dir / "model", 4, 2048, 49152, 512, 4096, "CPU", own["properties"], own["kv_cache"],
        prefix_cache=False, step_seconds=step_seconds,
    )  # fmt: skip
    runtime = openvino.OpenVINORuntime(options)
    try:
        runtime.submit(1, RuntimeRequest(np.arange(100, 110), 1000), 0)
        list(runtime.step())
        runtime.submit(2, RuntimeRequest(np.arange(100, 1600), 1), 0)
        left = []
        for _ in range(2):
            list(runtime.step())
            left.append(runtime.stats().context_tokens)
    finally:
        runtime.close()
    # the answer that runs takes one token of each step
    assert left == [1500 - (chunk - 1), 1500 - 2 * (chunk - 1)]
