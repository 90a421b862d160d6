"""The figures of an engine folder: the stored ones, or measured again against a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llmops.build.manifest import EngineManifest
from llmops.build.quality.gates import Quality
from llmops.errors import InputError

if TYPE_CHECKING:
    from llmops.build.quality.reference import Reference


def evaluate(folder: Path, against: str | None) -> tuple[Quality, str]:
    """(figures, format of the weights). Raises InputError when there is nothing to show or to measure."""
    manifest = EngineManifest.load(folder)
    if against is not None:
        return _measure(folder, manifest, against), manifest.quantisation.weights
    if manifest.quality is None:
        raise InputError(f"{folder} has no figures: its build measured none. Give the source: --against CHECKPOINT.")
    return Quality(**manifest.quality), manifest.quantisation.weights


def _measure(folder: Path, manifest: EngineManifest, against: str) -> Quality:
    """Needs the memory of the full-precision model, once for the source and once for the engine's weights."""
    from llmops.build.checkpoint import open_checkpoint
    from llmops.build.quality.run import measure

    if manifest.target not in ("tensorrt", "pytorch"):
        raise InputError(f"--against works for targets tensorrt and pytorch; {folder} is of target {manifest.target}.")
    weights = folder / ("checkpoint" if manifest.target == "tensorrt" else manifest.model_dir)
    if not (weights / "config.json").is_file():
        raise InputError(f"{weights} is gone, so the weights cannot be read back; build the engine again.")
    checkpoint = open_checkpoint(against)
    with tempfile.TemporaryDirectory(prefix="llmops-eval-") as scratch:
        return measure(weights, manifest.target, checkpoint, _record(against, Path(scratch)))


def _record(against: str, scratch: Path) -> Reference:
    from llmops.build.checkpoint import open_checkpoint
    from llmops.build.quality import reference
    from llmops.build.quantize.loading import load_model, load_tokenizer, quiet

    checkpoint = open_checkpoint(against)
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    with quiet():
        return reference.Reference.record(model, tokenizer, set(checkpoint.special_tokens.end), scratch)
