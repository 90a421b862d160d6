"""The pytorch target. Its place is here; it is not filled yet and says so."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from llmops.build.checkpoint import Checkpoint
from llmops.build.manifest import TargetName
from llmops.build.spec import BuildSpec
from llmops.build.targets.base import Progress, TargetResult
from llmops.errors import InputError


class _NotYet:
    name: TargetName = "pytorch"

    def validate(self, spec: BuildSpec, checkpoint: Checkpoint) -> None:
        _refuse()

    def disk_bytes(self, spec: BuildSpec, checkpoint: Checkpoint) -> int:
        return 0

    def versions(self) -> dict[str, str]:
        return {}

    def build(self, spec: BuildSpec, checkpoint: Checkpoint, workdir: Path, progress: Progress) -> TargetResult:
        _refuse()


def _refuse() -> NoReturn:
    raise InputError("--target pytorch is not available in this version; use --target openvino.")


target = _NotYet()
