"""Build an engine folder from a checkpoint, atomically and cached by content."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmops import __version__
from llmops.build import encoder
from llmops.build.checkpoint import Checkpoint, open_checkpoint
from llmops.build.checkpoint.hashing import digest_if_file
from llmops.build.checkpoint.lora_adapters import adapters_digest
from llmops.build.encoder import EncoderCheckpoint, open_encoder
from llmops.build.engine_folder.atomic_folder import (
    StagingFolder,
    check_space,
    list_files,
    reject_added_files,
    reject_put_by_another,
    remove_leftovers,
    report_full_disk,
    resolve_output,
)
from llmops.build.engine_folder.build_lock import exclusive_replacement
from llmops.build.engine_folder.build_stages import remove_stages, remove_unfinished_stages
from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest, QualityMetrics, Source, measure_files
from llmops.build.plan.build_plan import BuildPlan
from llmops.build.progress import Progress, SilentProgress
from llmops.build.spec import BuildSpec
from llmops.build.targets.build_target import TargetJob, get_target
from llmops.build.targets.nvidia import trtllm_build
from llmops.errors import CheckpointError, InputError, first_validation_error

#: Version of the build's code, part of every build key. Increase the number when the same inputs
#: give another engine than before.
_REVISION = 5
#: Names at the top of engine folders of earlier builds, whose engine.json lists no files.
_EARLIER_NAMES = {
    FILE_NAME, "model", "tokenizer", "checkpoint", "lora", "lora_prefetch", trtllm_build.LOG, trtllm_build.SCRIPT,
    trtllm_build.TIMING_CACHE, "llm_args.json", "xgrammar_tokenizer_info.json",
}  # fmt: skip
#: Suffixes of hidden files that a running or killed command leaves in an engine folder.
_LEFTOVERS = (".lock", ".part", ".building")


def build(spec: BuildSpec, progress: Progress | None = None, force: bool = False) -> tuple[EngineManifest, bool]:
    """Build the engine folder `spec.output`.

    Args:
        spec: The build specification.
        progress: Receives the stages, warnings and notes of the build.
        force: Build even if the folder has an engine of the same inputs, options and versions, and
            use no finished stage of an earlier attempt.

    Returns:
        The manifest, and True if the folder already had an engine of the same inputs.

    Raises:
        CheckpointError, InputError, MissingDependencyError, ResourceError, BuildError: The build is
        not possible, or it failed. `spec.output` has not changed.
    """
    progress = progress or SilentProgress()
    spec = replace(spec, output=resolve_output(spec.output))
    job = prepare(spec, open_model(spec.checkpoint))
    # Report damaged files beside the weights before the work begins.
    job.inspect()
    with _exclusive_build(spec.output, progress):
        return _build(job, progress, force)


def open_model(ref: str, weights: bool = True) -> Checkpoint | EncoderCheckpoint:
    """Open `ref` as an encoder or a decoder checkpoint.

    `open_checkpoint` describes the arguments and errors.
    """
    return open_encoder(ref) or open_checkpoint(ref, weights)


def prepare(spec: BuildSpec, checkpoint: Checkpoint | EncoderCheckpoint) -> TargetJob[Any]:
    """Return the job of a build.

    Raises:
        InputError: The plan was made for another model, or the output is not an engine folder. The
            target's `prepare` may raise other errors.
    """
    if isinstance(checkpoint, EncoderCheckpoint):
        job: TargetJob[Any] = encoder.target.prepare(spec, checkpoint)
    else:
        if spec.plan:
            BuildPlan.from_dict(spec.plan).check(checkpoint.architecture)
        job = get_target(spec.target).prepare(spec, checkpoint)
    _check_output(spec.output)
    return job


@contextlib.contextmanager
def _exclusive_build(output: Path, progress: Progress) -> Iterator[None]:
    """Hold the build lock of `output` and remove the leftovers of killed builds."""
    with report_full_disk(output), exclusive_replacement(output, progress.note):
        # Another build may have finished while this one waited for the lock.
        _check_output(output)
        remove_leftovers(output.absolute())
        remove_unfinished_stages(output)
        yield


def _build(job: TargetJob[Any], progress: Progress, force: bool) -> tuple[EngineManifest, bool]:
    output = job.spec.output
    fresh = not (output / FILE_NAME).is_file()
    if fresh:  # Report a machine that cannot build before hashing files for minutes.
        job.check()
    with progress.stage("Hashing the checkpoint"):
        source = job.checkpoint.source()
    key = build_key(job, source)
    if force:
        remove_stages(output)
    present = None if force else _up_to_date_manifest(output, key)
    if present is None:
        reject_added_files(output, _added_files(output))
        if not fresh:
            job.check()
        check_space(output, max(0, job.disk_bytes - job.kept_bytes))
        with StagingFolder(output) as workdir:
            try:
                manifest = _make(job, source, key, workdir, progress)
            except ValidationError as error:
                raise CheckpointError(
                    f"{job.checkpoint.ref} has a value that no engine can have "
                    f"({first_validation_error(error, 'its settings')}); correct it in the checkpoint."
                ) from error
    # The engine is in its place, so no restart needs the stages any longer.
    remove_stages(output)
    return (manifest, False) if present is None else (present, True)


def build_key(job: TargetJob[Any], source: Source) -> str:
    """Return the SHA-256 of all inputs of the build: files, options and versions."""
    spec = job.spec
    content = {
        "revision": _REVISION,
        "files": [[file.path, file.sha256] for file in source.files],
        "spec": spec.key_fields(),
        "versions": job.versions,
        "adapters": adapters_digest(spec.options.get("adapters")),
    }
    if spec.calib_dataset:
        content["calibration"] = digest_if_file(spec.calib_dataset)
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _make(job: TargetJob[Any], source: Source, key: str, workdir: Path, progress: Progress) -> EngineManifest:
    spec, checkpoint = job.spec, job.checkpoint
    with progress.stage("Writing the tokenizer"):
        tokenizer = job.write_tokenizer(workdir / "tokenizer", progress)
    result = job.build(workdir, progress)
    manifest = EngineManifest(
        key=key,
        name=spec.name or checkpoint.name,
        target=spec.target,
        architecture=checkpoint.hf_class,
        model_dir=result.model_dir,
        source=source,
        versions={"llmops": __version__, **{name: v for name, v in job.versions.items() if v}},
        quantisation=result.quantisation,
        parallelism=result.parallelism,
        limits=result.limits,
        tokenizer=tokenizer,
        sampling=job.sampling,
        complete=result.complete,
        files=list_files(workdir),
        contents=measure_files(workdir, tokenizer.directory, result.model_dir),
        plan=spec.plan,
        quality=QualityMetrics(**result.quality) if result.quality else None,
        golden=result.golden,
        extra=result.extra,
    )
    manifest.save(workdir)
    job.reject_changed_inputs()
    return manifest


def _check_output(output: Path) -> None:
    reject_put_by_another(output)
    if output.is_file() or (output.is_dir() and not (output / FILE_NAME).is_file() and any(output.iterdir())):
        raise InputError(f"{output} exists and is not an engine folder; give -o another folder, or remove it.")


def _added_files(output: Path) -> list[str]:
    """Return the paths that no build wrote, in the engine folder that a build replaces."""
    made, names = set[str](), _EARLIER_NAMES
    with contextlib.suppress(InputError):
        manifest = EngineManifest.load(output)
        if manifest.files:
            # `build --resume` and build.sh write an engine, a log and a cache after engine.json.
            resumed = {trtllm_build.ENGINE_DIR, trtllm_build.LOG, trtllm_build.TIMING_CACHE}
            made, names = set(manifest.files), {FILE_NAME, *(resumed if manifest.target == "tensorrt" else ())}
    added = (path for path in list_files(output) if path not in made and path.partition("/")[0] not in names)
    return [path for path in added if not (path[0] == "." and path.endswith(_LEFTOVERS))]


def _up_to_date_manifest(output: Path, key: str) -> EngineManifest | None:
    _check_output(output)
    try:
        manifest = EngineManifest.load(output)
    except InputError:
        # The folder has no engine, or an engine of another version, which the build replaces.
        return None
    complete = (output / manifest.model_dir).is_dir() and (output / manifest.tokenizer.directory).is_dir()
    if manifest.key != key or not complete:
        return None
    try:
        manifest.check_files(output)
    except InputError:
        return None  # The engine is damaged, so it is built again.
    return manifest
