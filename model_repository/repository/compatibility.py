"""Checks that the installed server can run a repository's engines.

A failed check names an image that can run them.
"""

import os
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from llmops.build.environment import installed_version
from llmops.build.target_facts import TARGETS
from llmops.build.trtllm.container_images import DEFAULT_TAG, IMAGES, TrtllmImage
from llmops.build.trtllm.image_selection import check_image, check_trtllm_installed, image_for
from llmops.contract import ENGINE_SUFFIX, RUNTIME_PARAMETER
from llmops.errors import InputError, MissingDependencyError
from llmops.model_repository.repository.manifest import RepositoryManifest, ServedEngine

#: Environment variable with the tag of NVIDIA's image, which the image sets.
TAG_VARIABLE = "NVIDIA_TRITON_SERVER_VERSION"


def check_library(target: str, version: str) -> None:
    """Check that the TensorRT-LLM of this machine or container can run an engine.

    Without TensorRT-LLM the repository is meant for another machine, and any engine passes.

    Raises:
        VersionMismatchError: The library cannot run the engine. The message names an image that can
            run it.
    """
    installed, tag = installed_version("tensorrt_llm"), os.environ.get(TAG_VARIABLE, "")
    if installed:
        check_trtllm_installed(target, version, installed)
    elif tag in IMAGES:
        check_image(target, version, tag)


def check_engines(manifest: RepositoryManifest) -> None:
    """Raise InputError for the first engine that was removed from its folder or is damaged."""
    for name, engine in manifest.engines.items():
        directory = Path(engine.directory)
        if not directory.is_dir():
            raise InputError(
                f"The engine of {name} is no longer in {directory}; move it back, or make the repository again."
            )
        if (directory / FILE_NAME).is_file():
            EngineManifest.load(directory).check_files(directory)


def check_server(manifest: RepositoryManifest, models: dict[str, Any], backends: Path) -> None:
    """Check that a server can run all engines.

    Args:
        manifest: The manifest of the repository.
        models: The model configurations in the repository.
        backends: The server's backend folder.

    Raises:
        VersionMismatchError: The installed library cannot run an engine.
        MissingDependencyError: A backend or library is missing.
    """
    for name, engine in manifest.engines.items():
        config = models.get(name + ENGINE_SUFFIX)
        if engine.tensorrt_llm and config is not None:
            _check_engine(name, engine, config, backends)


def required_image(manifest: RepositoryManifest) -> TrtllmImage | None:
    """Return the newest image that runs the TensorRT-LLM engines, or None without such engines.

    Raises:
        VersionMismatchError: No known image runs the engines.
    """
    engines = [engine for engine in manifest.engines.values() if engine.tensorrt_llm]
    # engines of target tensorrt need exactly the version that built them, other engines at least
    # that version
    engines.sort(key=lambda engine: engine.target != "tensorrt")
    return image_for(engines[0].target, engines[0].tensorrt_llm) if engines else None


def serving_image(image: TrtllmImage, manifest: RepositoryManifest) -> str:
    """Return the reference of the image that serves a repository.

    Our engine models import the Python library, which does not work in every image of NVIDIA.
    """
    ours = any(engine.tensorrt_llm and not engine.is_mpi for engine in manifest.engines.values())
    return image.serving("pytorch" if ours else "tensorrt")


def check_target(target: str) -> None:
    """Raise MissingDependencyError if TensorRT-LLM is needed but not installed.

    Called before a build, because quantization may take hours.
    """
    library = next((facts.library for name, facts in TARGETS.items() if name == target), "")
    if library == "tensorrt_llm" and not installed_version(library):
        raise MissingDependencyError(
            f"Engines of the target {target} need TensorRT-LLM, which is not installed here: run this in the image "
            f"{IMAGES[DEFAULT_TAG].serving(target)}, or `llmops build` here and `llmops repo` and `llmops serve` there."
        )


def _check_engine(name: str, engine: ServedEngine, config: Any, backends: Path) -> None:
    runtime = config.parameters[RUNTIME_PARAMETER].string_value if RUNTIME_PARAMETER in config.parameters else ""
    if config.backend == "tensorrtllm":
        if not (backends / "tensorrtllm").is_dir():
            raise MissingDependencyError(_other_image_message(name, engine, "NVIDIA's tensorrtllm backend"))
    elif runtime not in ("pytorch", "tensorrt"):
        return
    elif not installed_version("tensorrt_llm"):
        raise MissingDependencyError(_other_image_message(name, engine, "the tensorrt_llm library"))
    check_library(engine.target, engine.tensorrt_llm)


def _other_image_message(name: str, engine: ServedEngine, what: str) -> str:
    image = image_for(engine.target, engine.tensorrt_llm)
    reference = image.serving("tensorrt" if engine.is_mpi else "pytorch")
    recipe = image.recipe(reference)
    made = f" (`{recipe}`)" if recipe else ""
    return (
        f"{name} (target {engine.target}, TensorRT-LLM {engine.tensorrt_llm}) needs {what}, which is not "
        f"installed here: serve it in {reference}{made}; `llmops serve REPOSITORY --dry-run` prints the command."
    )
