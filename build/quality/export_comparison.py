"""Compare an exported checkpoint with the recorded answers of its source."""

from pathlib import Path

import torch

from llmops.build.checkpoint import Checkpoint
from llmops.build.engine_folder.manifest import QualityMetrics
from llmops.build.progress import Progress, SilentProgress
from llmops.build.quality.checkpoint_models import load_exported
from llmops.build.quality.layerwise_model import LayerwiseModel
from llmops.build.quality.measures import Comparison, largest_difference, range_coverage
from llmops.build.quality.reference_answers import ReferenceAnswers, SketchCollector, golden_agreement
from llmops.build.quantize.forward_progress import layer_progress

#: Weight error that is recorded in place of infinity, which JSON does not have.
_WORST = 1e9


def measure_export(
    folder: Path, target: str, checkpoint: Checkpoint, reference: ReferenceAnswers, progress: Progress | None = None
) -> QualityMetrics:
    """Return the quality metrics of the export in `folder`.

    Raises:
        BuildError: The export cannot be loaded.
    """
    progress = progress or SilentProgress()
    with progress.stage("Reading the export back"):
        exported = load_exported(folder, target, checkpoint)
    return compare_export(exported, reference, progress)


def compare_export(
    exported: LayerwiseModel, reference: ReferenceAnswers, progress: Progress | None = None
) -> QualityMetrics:
    """Return the quality metrics of a loaded export against the answers of its source."""
    comparison, sketches, progress = Comparison(), SketchCollector(exported), progress or SilentProgress()
    with progress.stage("Measuring quality", reference.forward_cost()), layer_progress(exported.module, progress):
        found = exported.log_probs([*reference.texts, *reference.answered], sketches.add)
        for ids, expected in zip(reference.texts, reference.log_probs(), strict=True):
            comparison.add(expected, next(found)[:, : expected.shape[-1]], torch.tensor(ids[1:]))
        golden = golden_agreement(found, reference)
    error, name = largest_difference(sketches.found, reference.sketches)
    covers = [(value, name) for name, value in range_coverage(exported.inputs, reference.ranges).items()]
    return QualityMetrics(
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
