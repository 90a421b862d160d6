"""The figures of an engine folder: the stored ones, or measured again against a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llmops.build.manifest import FILE_NAME, EngineManifest
from llmops.build.quality.gates import Quality
from llmops.errors import InputError

if TYPE_CHECKING:
    from llmops.build.checkpoint import Checkpoint
    from llmops.build.quality.reference import Reference


def evaluate(folder: Path, against: str | None) -> tuple[Quality, str]:
    """(figures, format of the weights) of an engine folder, or of a quantised Hugging Face checkpoint. Raises
    InputError when there is nothing to show or to measure."""
    if not (folder / FILE_NAME).is_file() and (folder / "config.json").is_file():
        return _evaluate_checkpoint(folder, against)
    manifest = EngineManifest.load(folder)
    if against is not None:
        return _measure_engine(folder, manifest, against), manifest.quantisation.weights
    if manifest.quality is None:
        raise InputError(f"{folder} has no figures: its build measured none. Give the source: --against CHECKPOINT.")
    return Quality(**manifest.quality), manifest.quantisation.weights


def _evaluate_checkpoint(folder: Path, against: str | None) -> tuple[Quality, str]:
    from llmops.build.checkpoint import open_checkpoint

    if against is None:
        raise InputError(f"{folder} is a checkpoint, not an engine; give what to compare it with: --against SOURCE.")
    found = open_checkpoint(str(folder)).quantisation
    return _measure(folder, "pytorch", against), found.method if found is not None else "none"


def _measure_engine(folder: Path, manifest: EngineManifest, against: str) -> Quality:
    if manifest.target not in ("tensorrt", "pytorch"):
        raise InputError(f"--against works for targets tensorrt and pytorch; {folder} is of target {manifest.target}.")
    weights = folder / ("checkpoint" if manifest.target == "tensorrt" else manifest.model_dir)
    if not (weights / "config.json").is_file():
        raise InputError(f"{weights} is gone, so the weights cannot be read back; build the engine again.")
    return _measure(weights, manifest.target, against)


def _measure(weights: Path, target: str, against: str) -> Quality:
    """Needs the memory of the full-precision model, once for the source and once for the engine's weights."""
    from llmops.build.checkpoint import open_checkpoint
    from llmops.build.quality.run import measure
    from llmops.build.quantize.hf_files import check_readable

    if target == "pytorch":
        check_readable(weights)
    source = open_checkpoint(against)
    if source.quantisation is not None and source.quantisation.method != "gguf":
        raise InputError(
            f"--against {against} is quantised itself ({source.quantisation.method}); give the full-precision source."
        )
    with tempfile.TemporaryDirectory(prefix="llmops-eval-") as scratch:
        return measure(weights, target, source, _record(source, Path(scratch)))


def _record(checkpoint: Checkpoint, scratch: Path) -> Reference:
    from llmops.build.quality import reference
    from llmops.build.quantize.loading import load_model, load_tokenizer, quiet

    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    with quiet():
        return reference.Reference.record(model, tokenizer, set(checkpoint.special_tokens.end), scratch)
