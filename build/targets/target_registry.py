"""Target name -> its module, imported only when it is used."""

from __future__ import annotations

import importlib

from llmops.build.checkpoint import Checkpoint
from llmops.build.target_facts import TargetName
from llmops.build.targets.build_target import BuildTarget


def get_target(name: TargetName) -> BuildTarget[Checkpoint]:
    """The target of that name; each module exports it as `target`."""
    target: BuildTarget[Checkpoint] = importlib.import_module(f"llmops.build.targets.{name}").target
    return target
