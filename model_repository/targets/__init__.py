"""The build targets: one module per target, with its part of the engine model's configuration."""

import importlib

from llmops.build.target_facts import NAMES
from llmops.errors import InputError
from llmops.model_repository.targets.repository_target import EngineModelConfig, RepositoryTarget

__all__ = ["EngineModelConfig", "RepositoryTarget", "find_target"]


def find_target(name: str, serving: str = "") -> RepositoryTarget:
    """Return the target called `name`.

    Args:
        name: The build target.
        serving: The server of the engine: `llmops`, `nvidia`, or empty for the target's default.

    Raises:
        InputError: The target is unknown, or NVIDIA's backend cannot run engines of the target.
    """
    if name not in NAMES:
        raise InputError(
            f"Engines of target {name} cannot be put into a repository by this version of llmops, which "
            f"supports {', '.join(NAMES)}; update llmops, or build for one of these."
        )
    if serving == "llmops" and name == "tensorrt":
        from llmops.model_repository.targets.tensorrt import TensorrtRepositoryTarget

        return TensorrtRepositoryTarget(ours=True)
    if serving == "nvidia" and name != "tensorrt":
        raise InputError(
            f"NVIDIA's C++ backend runs TensorRT engines only, not target {name}: leave --serving nvidia out, or build "
            "with --target tensorrt."
        )
    target: RepositoryTarget = importlib.import_module(f"llmops.model_repository.targets.{name}").target
    return target
