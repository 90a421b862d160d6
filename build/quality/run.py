"""Compare an exported checkpoint with the recorded answers of its source."""

from __future__ import annotations

from pathlib import Path

import torch

from llmops.build.checkpoint import Checkpoint
from llmops.build.progress import Progress, SilentProgress
from llmops.build.quality.exported import load_exported
from llmops.build.quality.fidelity import furthest
from llmops.build.quality.gates import Quality
from llmops.build.quality.layered import Layered
from llmops.build.quality.metrics import Comparison
from llmops.build.quality.ranges import cover
from llmops.build.quality.reference import Reference, Sketches, golden_agreement
from llmops.build.quantize.progress_meter import layer_progress

# JSON has no infinity
_WORST = 1e9


def measure(
    folder: Path, target: str, checkpoint: Checkpoint, reference: Reference, progress: Progress | None = None
) -> Quality:
    """Load the export in `folder` and measure it. Raises BuildError when it cannot be loaded."""
    progress = progress or SilentProgress()
    with progress.stage("Reading the export back"):
        exported = load_exported(folder, target, checkpoint)
    return compare(exported, reference, progress)


def compare(exported: Layered, reference: Reference, progress: Progress | None = None) -> Quality:
    """All figures of an export against the reference."""
    comparison, sketches, progress = Comparison(), Sketches(exported), progress or SilentProgress()
    with progress.stage("Measuring quality", reference.work()), layer_progress(exported.module, progress):
        found = exported.log_probs([*reference.texts, *reference.answered], sketches.add)
        for ids, expected in zip(reference.texts, reference.log_probs(), strict=True):
            comparison.add(expected, next(found)[:, : expected.shape[-1]], torch.tensor(ids[1:]))
        golden = golden_agreement(found, reference)
    error, name = furthest(sketches.found, reference.sketches)
    covers = [(value, name) for name, value in cover(exported.inputs, reference.ranges).items()]
    return Quality(
        perplexity=comparison.perplexity,
        perplexity_ratio=comparison.perplexity_ratio,
        top1_agreement=comparison.top1_agreement,
        mean_kl=comparison.mean_kl,
        worst_token_kl=comparison.kl_worst,
        golden_agreement=golden,
        tokens=comparison.tokens,
        prompts=len(reference.prompts),
        weight_error=min(error, _WORST),
        weight_error_at=name,
        narrowest=min(covers, default=None),
        widest=max(covers, default=None),
    )
