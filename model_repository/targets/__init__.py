"""One module per build target: what it contributes to the engine model's configuration.

How an engine is made belongs to `build/targets/`; how it runs inside Triton to the engine model's `runtimes/`.
"""

from __future__ import annotations

import importlib

from llmops.build.target_names import NAMES
from llmops.errors import InputError
from llmops.model_repository.targets.base import EngineModel, RepositoryTarget

__all__ = ["EngineModel", "RepositoryTarget", "find_target"]


def find_target(name: str) -> RepositoryTarget:
    if name not in NAMES:
        raise InputError(
            f"engines of target {name} cannot be put into a repository by this version of llmops "
            f"(it knows {', '.join(NAMES)})."
        )
    target: RepositoryTarget = importlib.import_module(f"llmops.model_repository.targets.{name}").target
    return target
