"""One module per build target: what it contributes to the engine model's configuration."""

from __future__ import annotations

from llmops.errors import InputError
from llmops.model_repository.targets.base import EngineModel, RepositoryTarget
from llmops.model_repository.targets.openvino import OpenVINOTarget
from llmops.model_repository.targets.pytorch import PytorchTarget
from llmops.model_repository.targets.tensorrt import TensorrtTarget

_TARGETS: dict[str, type[RepositoryTarget]] = {
    "openvino": OpenVINOTarget,
    "pytorch": PytorchTarget,
    "tensorrt": TensorrtTarget,
}

__all__ = ["EngineModel", "RepositoryTarget", "find_target"]


def find_target(name: str) -> RepositoryTarget:
    if name not in _TARGETS:
        raise InputError(
            f"engines of target {name} cannot be put into a repository by this version of llmops "
            f"(it knows {', '.join(_TARGETS)})."
        )
    return _TARGETS[name]()
