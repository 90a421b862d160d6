"""The stage that both targets share: source weights -> quantised checkpoint with its quality figures."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.installed import installed_version
from llmops.build.quality.gates import Quality
from llmops.build.spec import BuildSpec
from llmops.build.targets.base import Progress
from llmops.build.targets.nvidia.request import Request
from llmops.build.targets.nvidia.stages import stage

# Raised when the same inputs give other files than before.
_REVISION = 1
LIBRARIES = ("nvidia-modelopt", "torch", "transformers")


def library_versions() -> dict[str, str]:
    return {name: installed_version(name) for name in LIBRARIES}


def quantised_checkpoint(
    spec: BuildSpec, checkpoint: Checkpoint, request: Request, progress: Progress
) -> tuple[Path, dict[str, Any]]:
    """The stage's folder, holding `checkpoint/`, and its record (quality, calibration tokens).

    Raises BuildError when the gates are not met; the stage stays, so another limit needs no second calibration.
    """
    content = _stage_content(spec, checkpoint, request)
    folder, cached = stage(
        spec.output, "quantised", content, lambda part: _make(spec, checkpoint, request, part, progress)
    )
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    if cached:
        progress.warn("the quantised checkpoint of an earlier, unfinished build is used again.")
    if record["quality"] is not None:
        request.gates.check(Quality(**record["quality"]))
    return folder, record


def _stage_content(spec: BuildSpec, checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
    return {
        "revision": _REVISION,
        "files": [[file.path, file.sha256] for file in checkpoint.files],
        "target": spec.target,
        "quant": [request.form.name, request.kv_cache, request.group_size],
        "calibration": asdict(request.calibration),
        "parallel": [spec.tp, spec.pp] if spec.target == "tensorrt" else None,
        "quality": request.measure_quality,
        "versions": library_versions(),
    }


def _make(spec: BuildSpec, checkpoint: Checkpoint, request: Request, part: Path, progress: Progress) -> None:
    from llmops.build.quality.reference import Reference
    from llmops.build.quality.run import measure

    reference_dir = part / "reference"
    tokens = _quantise_and_export(spec, checkpoint, request, part, reference_dir, progress)
    quality = None
    if request.measure_quality:
        with progress.stage("Measuring quality"):
            quality = measure(part / "checkpoint", spec.target, checkpoint, Reference(reference_dir)).as_dict()
        shutil.rmtree(reference_dir)
    (part / "record.json").write_text(json.dumps({"quality": quality, "calibration_tokens": tokens}, indent=2))


def _quantise_and_export(
    spec: BuildSpec, checkpoint: Checkpoint, request: Request, part: Path, reference_dir: Path, progress: Progress
) -> int:
    """Its own function so that the source model is gone before the export is measured."""
    from llmops.build.quality.reference import Reference
    from llmops.build.quantize.export import export_engine_checkpoint, export_hf_checkpoint
    from llmops.build.quantize.loading import load_model, load_tokenizer, quiet
    from llmops.build.quantize.quantizer import quantize

    with progress.stage("Loading the weights"):
        model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    if request.measure_quality:
        with progress.stage("Recording the source"), quiet():
            Reference.record(model, tokenizer, set(checkpoint.special_tokens.end), reference_dir)
    tokens = quantize(
        model, tokenizer, request.form, request.kv_cache, request.group_size, request.calibration, progress
    )
    with progress.stage("Exporting"):
        if spec.target == "tensorrt":
            export_engine_checkpoint(
                model, checkpoint.architecture, request.form, part / "checkpoint", spec.tp, spec.pp
            )
        else:
            export_hf_checkpoint(model, checkpoint.architecture, part / "checkpoint")
    del model
    gc.collect()
    return tokens
