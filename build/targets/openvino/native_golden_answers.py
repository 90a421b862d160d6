"""Compute golden answers of a native OpenVINO build, without GenAI's pipeline.

The graph is the graph of the engine, but unquantised and with a plain KV cache, so a comparison
shows changes by quantisation, paged attention or batching. tests/agreement checks the graph itself
against transformers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.golden_prompts import TOKENS, GoldenPrompt, golden_prompts, golden_record, truncate_at_end
from llmops.build.engine_folder.manifest import Golden
from llmops.build.environment import available_memory, installed_version
from llmops.build.progress import Progress
from llmops.build.targets.openvino.native_export import float_model
from llmops.errors import CheckpointError

#: Bytes of memory per parameter. OpenVINO holds the weights as float32 twice, as constants and in
#: its own layout, besides the stored weights (measured: 8.6 from 4 bits and 9.4 from float16).
_PER_PARAMETER = 10
#: Number of tokens of each prompt that are read at once. The graph returns scores for all of them.
_CHUNK = 64


def golden_answers(checkpoint: Checkpoint, tokenizer_dir: Path, progress: Progress) -> Golden | None:
    """Return the golden answers, or None after a note to the user.

    The result is None if the unquantised model does not fit into memory, or there are no golden
    prompts.
    """
    needed, available = checkpoint.parameters * _PER_PARAMETER, available_memory()
    if available is not None and needed > available:
        progress.note(
            f"No golden answers are kept: the unquantised model needs {needed / 2**30:.1f} GiB of memory, and "
            f"{available / 2**30:.1f} GiB are available. `llmops verify` will not compare answers."
        )
        return None
    prompts = golden_prompts(tokenizer_dir, checkpoint.architecture.max_position_embeddings, progress.note)
    if not prompts:
        return None
    with progress.stage("Recording golden answers", TOKENS), float_model(checkpoint) as model:
        config = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
        with np.errstate(invalid="ignore"):
            tokens, scores = _greedy(request, prompts, set(checkpoint.special_tokens.end), progress)
    if not np.isfinite(scores).all():
        raise CheckpointError(f"{checkpoint.ref} answers with NaN, so its weights are damaged; download it again.")
    return golden_record(f"OpenVINO {installed_version('openvino')}, float32", prompts, tokens, scores)


def _greedy(
    request: Any, prompts: list[GoldenPrompt], end: set[int], progress: Progress
) -> tuple[list[list[int]], list[list[float]]]:
    """Return greedy tokens per prompt, up to a token of `end`, and their log-probabilities.

    All prompts run as one batch, left-padded, through `request`, an inference request of OpenVINO.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = np.array([[0] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts], np.int64)
    mask = np.array([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts], np.int64)
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    beams = np.arange(len(prompts), dtype=np.int32)
    tokens: list[np.ndarray] = []
    scores: list[np.ndarray] = []
    for _ in range(TOKENS):
        past = mask.shape[1] - ids.shape[1]
        for at in range(0, ids.shape[1], _CHUNK):
            end_at = at + _CHUNK
            names = {"input_ids": ids[:, at:end_at], "position_ids": positions[:, at:end_at], "beam_idx": beams}
            found = request.infer({**names, "attention_mask": mask[:, : past + end_at]})
        logits = found["logits"][:, -1].astype(np.float64)
        chosen = logits.argmax(-1)
        peak = logits.max(-1)
        scores.append(-np.log(np.exp(logits - peak[:, None]).sum(-1)))
        tokens.append(chosen)
        ids, positions = chosen[:, None].astype(np.int64), positions[:, -1:] + 1
        mask = np.concatenate([mask, np.ones((len(prompts), 1), np.int64)], axis=1)
        progress.advance()
    rows: list[list[int]] = np.stack(tokens, 1).tolist()
    return [truncate_at_end(row, end) for row in rows], np.stack(scores, 1).tolist()
