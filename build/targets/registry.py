"""Target name -> its module, imported only when it is used."""

from __future__ import annotations

import importlib

from llmops.build.checkpoint import Checkpoint
from llmops.build.target_names import TargetName
from llmops.build.targets.base import Target


def get_target(name: TargetName) -> Target[Checkpoint]:
    """The target of that name; each module exports it as `target`."""
    target: Target[Checkpoint] = importlib.import_module(f"llmops.build.targets.{name}").target
    return target
