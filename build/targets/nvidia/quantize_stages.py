"""Quantise a checkpoint and measure its quality, in resumable stages shared by both NVIDIA targets."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.file_checks import read_json
from llmops.build.checkpoint.hashing import digest_if_file
from llmops.build.engine_folder.build_stages import finished_stage, stage
from llmops.build.engine_folder.manifest import Golden, QualityMetrics
from llmops.build.environment import installed_version
from llmops.build.progress import Progress
from llmops.build.targets.nvidia.build_request import BuildRequest

#: Version of the stages' code, part of every stage's key. Increase the number when the same inputs
#: give other files than before.
_REVISION = 6
LIBRARIES = ("nvidia-modelopt", "torch", "transformers")


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries whose version changes the quantised files."""
    return {name: installed_version(name) for name in LIBRARIES}


def quantised_checkpoint(request: BuildRequest, tokenizer: Path, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the finished stage, with `checkpoint/` in it, and the stage's record.

    The record has quality metrics, golden answers and the number of calibration tokens. `tokenizer`
    is the tokenizer folder of the engine.

    Raises:
        BuildError: A quality limit is exceeded. The finished stages are kept, so a build with
            another limit needs no second calibration.
    """
    return _QuantizeStages(request, tokenizer, progress).run()


def kept_bytes(request: BuildRequest) -> int:
    """Return the bytes of the finished stages that an earlier build of the same inputs left."""
    folder = finished_stage(request.spec.output, "quantised", stage_contents(request)["quantised"])
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def stage_contents(request: BuildRequest) -> dict[str, dict[str, Any]]:
    """Return the inputs of each stage, by the name of the stage.

    The stages are `source` (answers of the source model), `quantised` and `quality`.
    """
    spec = request.spec
    source = {
        "revision": _REVISION,
        "files": [[file.path, file.sha256] for file in request.checkpoint.files],
        "versions": library_versions(),
    }
    quantised = {
        **source,
        "target": spec.target,
        "quant": [request.quant_format.name, request.stored_cache, request.group_size, request.dtype],
        "calibration": asdict(request.calibration),
        "calibration_file": digest_if_file(request.calibration.dataset),
        "parallel": [spec.tp, spec.pp] if spec.target == "tensorrt" else None,
    }
    return {"source": source, "quantised": quantised, "quality": quantised}


class _QuantizeStages:
    """The three stages of quantising a checkpoint.

    A stage that an earlier build finished is reused. The source is loaded when a stage needs it.
    """

    def __init__(self, request: BuildRequest, tokenizer: Path, progress: Progress) -> None:
        self.spec, self.checkpoint, self.request, self.progress = request.spec, request.checkpoint, request, progress
        self.tokenizer_dir = tokenizer
        self.contents = stage_contents(request)
        self.source: tuple[Any, Any] | None = None
        self.imported = False

    def run(self) -> tuple[Path, dict[str, Any]]:
        answers = self._answers() if self.request.measure_quality else None
        folder = self._stage("quantised", "the quantised checkpoint", self._quantise)
        self._free()
        record = dict(read_json(folder / "record.json"))
        record["quality"] = None if answers is None else self._quality(folder / "checkpoint", answers)
        record["golden"] = None if answers is None else _golden(answers)
        return folder, record

    def _free(self) -> None:
        """Release the memory of the source before the export is loaded."""
        if self.source is not None:
            from llmops.build.quantize.model_loading import release_memory

            self.source = None
            release_memory()

    def _stage(self, name: str, title: str, make: Callable[[Path], None]) -> Path:
        def prepared(part: Path) -> None:
            from llmops.build.quantize.model_loading import report_full_gpu

            self._import_libraries()
            with report_full_gpu():
                make(part)

        folder, cached = stage(self.spec.output, name, self.contents[name], prepared)
        if cached:
            self.progress.note(f"Taken from an earlier, unfinished build: {title}.")
        return folder

    def _import_libraries(self) -> None:
        """Import the libraries while no caller holds a model (see `import_libraries`)."""
        if not self.imported:
            from llmops.build.quantize.model_loading import import_libraries

            with self.progress.stage("Loading the libraries"):
                import_libraries()
            self.imported = True

    def _loaded(self) -> tuple[Any, Any]:
        """Return the model and the tokenizer of the source."""
        from llmops.build.quantize.model_loading import load_model, load_tokenizer

        if self.source is None:
            with self.progress.stage("Loading the weights"):
                self.source = load_model(self.checkpoint), load_tokenizer(self.checkpoint, self.tokenizer_dir)
        return self.source

    def _answers(self) -> Path:
        return self._stage("source", "the source's answers", self._record)

    def _record(self, part: Path) -> None:
        from llmops.build.quality.checkpoint_models import open_source
        from llmops.build.quality.reference_answers import ReferenceAnswers
        from llmops.build.quantize.model_loading import release_memory

        source = open_source(self.checkpoint)
        ReferenceAnswers.record(source, self.checkpoint, self.tokenizer_dir, part, self.progress)
        del source
        release_memory()

    def _quantise(self, part: Path) -> None:
        from llmops.build.quantize.checkpoint_export import export_engine_checkpoint, export_hf_checkpoint
        from llmops.build.quantize.quantizer import quantize

        spec, request, arch = self.spec, self.request, self.checkpoint.architecture
        model, tokenizer = self._loaded()
        tokens = quantize(
            model,
            tokenizer,
            request.quant_format,
            request.stored_cache,
            request.group_size,
            request.calibration,
            self.progress,
        )
        with self.progress.stage("Exporting"):
            if spec.target == "tensorrt":
                export_engine_checkpoint(
                    model, arch, request.quant_format, part / "checkpoint", spec.tp, spec.pp, request.dtype
                )
            else:
                export_hf_checkpoint(model, arch, request.quant_format, part / "checkpoint", request.dtype)
        (part / "record.json").write_text(json.dumps({"calibration_tokens": tokens}))

    def _quality(self, exported: Path, answers: Path) -> dict[str, Any]:
        """Return the quality metrics if they are within the limits."""
        folder = self._stage("quality", "the quality figures", lambda part: self._measure(exported, answers, part))
        figures = read_json(folder / "quality.json")
        self.request.gates.check(QualityMetrics(**figures))
        return figures

    def _measure(self, exported: Path, answers: Path, part: Path) -> None:
        from llmops.build.quality.export_comparison import measure_export
        from llmops.build.quality.reference_answers import ReferenceAnswers

        quality = measure_export(exported, self.spec.target, self.checkpoint, ReferenceAnswers(answers), self.progress)
        (part / "quality.json").write_text(json.dumps(quality.model_dump()))


def _golden(answers: Path) -> Golden | None:
    from llmops.build.quality.reference_answers import ReferenceAnswers

    return ReferenceAnswers(answers).golden
