"""Return the quality metrics of an engine folder, stored or measured again against a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmops.build.engine_folder.atomic_folder import scratch_folder
from llmops.build.engine_folder.manifest import EngineManifest, QualityMetrics
from llmops.build.quality.quality_gates import QualityGates
from llmops.errors import InputError

if TYPE_CHECKING:
    from llmops.build.checkpoint import Checkpoint
    from llmops.build.progress import Progress
    from llmops.build.quality.reference_answers import ReferenceAnswers


def evaluate(
    folder: Path, against: str | None, limits: Mapping[str, Any], progress: Progress
) -> tuple[QualityMetrics, QualityGates]:
    """Return the quality metrics of a folder, and the gates that apply.

    Args:
        folder: An engine folder.
        against: The source checkpoint to measure against, or None for the stored metrics.
        limits: Limits of the quality gate that override the limits of the build.
        progress: Receives the stages of the measurement.

    Raises:
        InputError: The folder has no stored metrics, or its weights cannot be measured.
    """
    manifest = EngineManifest.load(folder)
    gates = QualityGates.of_engine(manifest, limits)
    if against is not None:
        return _measure_engine(folder, manifest, against, progress), gates
    if manifest.quality is None:
        raise InputError(
            f"{folder} has no quality metrics, because its build measured none; give the source with --against "
            "CHECKPOINT."
        )
    return manifest.quality, gates


def _measure_engine(folder: Path, manifest: EngineManifest, against: str, progress: Progress) -> QualityMetrics:
    if manifest.target not in ("tensorrt", "pytorch"):
        raise InputError(
            f"--against works for targets tensorrt and pytorch, and {folder} has target {manifest.target}; leave it "
            "out."
        )
    weights = folder / ("checkpoint" if manifest.target == "tensorrt" else manifest.model_dir)
    if not (weights / "config.json").is_file():
        raise InputError(f"{weights} was removed, so the weights cannot be read back; build the engine again.")
    return _measure(weights, manifest.target, against, progress)


def _measure(weights: Path, target: str, against: str, progress: Progress) -> QualityMetrics:
    from llmops.build.checkpoint import open_checkpoint
    from llmops.build.quality.export_comparison import measure_export
    from llmops.build.quantize.hf_checkpoint_reader import check_format_readable
    from llmops.build.quantize.model_loading import report_full_gpu

    if target == "pytorch":
        check_format_readable(weights)
    source = open_checkpoint(against)
    if kept := source.kept_quantisation:
        raise InputError(f"--against {against} is itself quantised ({kept.method}); give the full-precision source.")
    with report_full_gpu(), scratch_folder("llmops-eval-") as scratch:
        return measure_export(weights, target, source, _record(source, scratch, progress), progress)


def _record(checkpoint: Checkpoint, scratch: Path, progress: Progress) -> ReferenceAnswers:
    from llmops.build.quality.checkpoint_models import open_source
    from llmops.build.quality.reference_answers import ReferenceAnswers
    from llmops.build.tokenizer import write_tokenizer

    tokenizer_dir = scratch / "tokenizer"
    write_tokenizer(checkpoint, tokenizer_dir, lambda sentence: None)
    return ReferenceAnswers.record(open_source(checkpoint), checkpoint, tokenizer_dir, scratch, progress)
