"""Finish an engine folder whose last step needs other hardware (`llmops build --resume DIR`)."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from llmops.build.engine_folder.atomic_folder import list_files, report_full_disk, sync_tree, write_text_atomically
from llmops.build.engine_folder.build_lock import exclusive_build
from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest, measure_files
from llmops.build.engine_folder.manifest_extras import TensorrtExtra
from llmops.build.progress import Progress, SilentProgress
from llmops.build.targets.nvidia import trtllm_build
from llmops.build.trtllm.image_selection import image_of
from llmops.build.trtllm.trtllm_build_flags import FLAGS, from_argv
from llmops.errors import BuildError, InputError, MissingDependencyError


def resume(folder: Path, in_container: bool = False, progress: Progress | None = None) -> tuple[EngineManifest, bool]:
    """Run the last step of the build in the engine folder `folder`.

    Returns:
        The manifest, and True if the engine was already finished.

    Raises:
        InputError: The folder is not an unfinished engine folder.
        MissingDependencyError, VersionMismatchError, BuildError: The step cannot run here, or it
        failed. The folder does not change, except for the log.
    """
    progress = progress or SilentProgress()
    EngineManifest.load(folder)
    with report_full_disk(folder), exclusive_build(folder, progress.note, inside=True):
        manifest = EngineManifest.load(folder)
        if manifest.complete:
            return manifest, True
        return _finish(manifest, folder, in_container, progress), False


def _finish(manifest: EngineManifest, folder: Path, in_container: bool, progress: Progress) -> EngineManifest:
    extra = manifest.extra if isinstance(manifest.extra, TensorrtExtra) else None
    # The folder may come from elsewhere, and must not name another program.
    if extra is None or extra.trtllm_build[:1] != [trtllm_build.PROGRAM]:
        raise InputError(f"{folder} is not complete, but nothing can be resumed in it; build it again.")
    image = image_of(extra.image)
    argv = extra.trtllm_build
    if in_container:
        _require_docker()
        argv = trtllm_build.docker_command(folder, image)
    else:
        _reject_paths(argv, folder)
        trtllm_build.check_version(image)
    _clear(folder / trtllm_build.ENGINE_DIR)
    before = {*list_files(folder)} - {trtllm_build.LOG}
    trtllm_build.run(argv, folder, manifest.parallelism.world_size, folder / trtllm_build.LOG, progress)
    contents = measure_files(folder, manifest.tokenizer.directory, manifest.model_dir)
    made = {*list_files(folder)} - before
    files = sorted({*manifest.files, *made}) if manifest.files else []
    finished = manifest.model_copy(update={"complete": True, "contents": contents, "files": files})
    _save(finished, folder)
    return finished


def _reject_paths(argv: Sequence[str], folder: Path) -> None:
    """Raise InputError for arguments that name code to run or files to write.

    The folder may come from elsewhere, and trtllm-build runs the code in --model_cls_file.
    """
    own = {"checkpoint_dir": trtllm_build.CHECKPOINT_DIR, "output_dir": trtllm_build.ENGINE_DIR}
    for name, value in from_argv(argv[1:]).items():
        if FLAGS[name].kind in ("path", "paths") and value != own.get(name):
            raise InputError(
                f"{folder} gives trtllm-build --{name}, with which a folder from elsewhere could run code or replace "
                f"files; if you made the folder, run {folder / trtllm_build.SCRIPT} in place of `--resume`."
            )


def _require_docker() -> None:
    if shutil.which("docker") is None:
        raise MissingDependencyError(
            "--in-container needs docker, which is not on PATH; install docker, or run this inside the image without "
            "--in-container."
        )


def _clear(engine_dir: Path) -> None:
    """Empty `engine_dir`: a rank file that a killed run cut short would look finished."""
    try:
        shutil.rmtree(engine_dir, ignore_errors=True)
        engine_dir.mkdir()
    except OSError as error:
        raise BuildError(
            f"{engine_dir} cannot be written ({error}); make it writable, or run this as its owner."
        ) from error


def _save(manifest: EngineManifest, folder: Path) -> None:
    """Write engine.json atomically after the engine is on the disk.

    A crash therefore never leaves the field `complete` true for an engine that is not.
    """
    sync_tree(folder / trtllm_build.ENGINE_DIR)
    write_text_atomically(folder / FILE_NAME, manifest.text())
