"""Golden answers of a native OpenVINO build: the decoder in the checkpoint's own numbers, without GenAI's pipeline.

The graph is the one that is built, but unquantised and run with a plain KV cache, so what quantisation, paged attention
or batching change shows. That the graph itself is right is what tests/agreement checks against transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.golden_prompts import TOKENS, GoldenPrompt, collected, golden_prompts, until_end
from llmops.build.engine_folder.manifest import Golden
from llmops.build.installed import installed_version
from llmops.build.progress import Progress
from llmops.build.targets.openvino.native import float_model

# what a build may take of the memory that is free
_SHARE = 0.6


def golden_answers(checkpoint: Checkpoint, tokenizer_dir: Path, progress: Progress) -> Golden | None:
    """None, and a note, where the unquantised model does not fit into memory or the template takes no plain message."""
    needed = checkpoint.parameters * 4
    if needed > _SHARE * _free_memory():
        progress.note(
            f"No golden answers are kept: the unquantised model needs {needed / 2**30:.1f} GiB of memory. "
            "`llmops verify` will not compare answers."
        )
        return None
    try:
        prompts = golden_prompts(tokenizer_dir)
    except ValueError as error:
        progress.note(f"No golden answers are kept: {error}.")
        return None
    with progress.stage("Recording golden answers", TOKENS), float_model(checkpoint) as model:
        config = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
        tokens, scores = _greedy(request, prompts, set(checkpoint.special_tokens.end), progress)
    return collected(f"OpenVINO {installed_version('openvino')}, float32", prompts, tokens, scores)


def _greedy(
    request: Any, prompts: list[GoldenPrompt], end: set[int], progress: Progress
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probabilities. All prompts as one batch, padded on the left."""
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = np.array([[0] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts], np.int64)
    mask = np.array([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts], np.int64)
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    beams = np.arange(len(prompts), dtype=np.int32)
    tokens: list[np.ndarray] = []
    scores: list[np.ndarray] = []
    for _ in range(TOKENS):
        names = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "beam_idx": beams}
        logits = request.infer(names)["logits"][:, -1].astype(np.float64)
        chosen = logits.argmax(-1)
        peak = logits.max(-1)
        scores.append(-np.log(np.exp(logits - peak[:, None]).sum(-1)))
        tokens.append(chosen)
        ids, positions = chosen[:, None].astype(np.int64), positions[:, -1:] + 1
        mask = np.concatenate([mask, np.ones((len(prompts), 1), np.int64)], axis=1)
        progress.advance()
    rows: list[list[int]] = np.stack(tokens, 1).tolist()
    return [until_end(row, end) for row in rows], np.stack(scores, 1).tolist()


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
