"""What a target is: one way to make an engine folder from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.engine_folder.manifest import Golden, Limits, Parallelism, Quantisation, TargetName
from llmops.build.progress import Progress
from llmops.build.spec import BuildSpec


@dataclass(frozen=True)
class TargetResult:
    """What a target reports for engine.json; its files lie in `workdir / model_dir`.

    `complete` is False when a step is left that needs other hardware (then `extra` says which command does it).
    """

    limits: Limits
    quantisation: Quantisation = field(default_factory=Quantisation)
    parallelism: Parallelism = field(default_factory=Parallelism)
    model_dir: str = "model"
    complete: bool = True
    plan: dict[str, Any] | None = None
    quality: dict[str, Any] | None = None
    golden: Golden | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Target(ABC):
    """A target's module exports one as `target`. Heavy imports belong inside `build`."""

    name: TargetName

    @abstractmethod
    def validate(self, spec: BuildSpec, checkpoint: Checkpoint) -> None:
        """Refuse what cannot work, before any work. Raises InputError or MissingDependencyError."""

    def check_machine(self, spec: BuildSpec, checkpoint: Checkpoint) -> None:
        """Raises MissingDependencyError or ResourceError when the build could not run here."""
        return

    def kept_bytes(self, spec: BuildSpec, checkpoint: Checkpoint) -> int:
        """What an earlier, unfinished build has written of it already."""
        return 0

    def plan_lines(self, spec: BuildSpec, checkpoint: Checkpoint) -> list[str]:
        """What --dry-run says of this target. Raises what `validate` does."""
        return []

    @abstractmethod
    def disk_bytes(self, spec: BuildSpec, checkpoint: Checkpoint) -> int:
        """Upper estimate of what `build` writes, temporary files included."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Libraries whose version changes the engine: distribution name -> version. Imports nothing heavy."""

    @abstractmethod
    def build(self, spec: BuildSpec, checkpoint: Checkpoint, workdir: Path, progress: Progress) -> TargetResult:
        """Write `workdir / model_dir`. `workdir / "tokenizer"` is there already; the caller adds engine.json and moves
        workdir into place.

        Raises BuildError; may leave anything in workdir then, the caller removes it.
        """
