"""Target name -> its module, imported only when it is used."""

from __future__ import annotations

import importlib

from llmops.build.engine_folder.manifest import TargetName
from llmops.build.targets.base import Target

_MODULES: dict[str, str] = {
    "openvino": "llmops.build.targets.openvino",
    "tensorrt": "llmops.build.targets.tensorrt",
    "pytorch": "llmops.build.targets.pytorch",
}


def get_target(name: TargetName) -> Target:
    """The target of that name; each module exports it as `target`."""
    target: Target = importlib.import_module(_MODULES[name]).target
    return target
