"""Compare an exported checkpoint with the recorded answers of its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llmops.build.checkpoint import Checkpoint
from llmops.build.quality.gates import Quality
from llmops.build.quality.metrics import Comparison
from llmops.build.quality.reference import Reference, golden_agreement, log_probs


def measure(folder: Path, target: str, checkpoint: Checkpoint, reference: Reference) -> Quality:
    """Load the export in `folder` and measure it. Raises BuildError when it cannot be loaded."""
    from llmops.build.quality.exported import load_exported

    return compare(load_exported(folder, target, checkpoint), reference)


def compare(model: Any, reference: Reference) -> Quality:
    """All figures of a loaded model against the reference."""
    comparison = Comparison()
    for ids, expected in reference:
        candidate = log_probs(model, ids)[:, : expected.shape[-1]]
        comparison.add(expected, candidate, torch.tensor(ids[1:]))
    return Quality(
        perplexity=comparison.perplexity,
        perplexity_ratio=comparison.perplexity_ratio,
        top1_agreement=comparison.top1_agreement,
        mean_kl=comparison.mean_kl,
        worst_token_kl=comparison.kl_worst,
        golden_agreement=golden_agreement(model, reference),
        tokens=comparison.tokens,
        prompts=len(reference.prompts),
    )
