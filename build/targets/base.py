"""What a target is: one way to make an engine folder from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llmops.build.checkpoint import Checkpoint
from llmops.build.manifest import Golden, Limits, Parallelism, Quantisation, TargetName
from llmops.build.spec import BuildSpec


class Progress(Protocol):
    """Where a build says how far it is. Rich on a terminal, plain lines elsewhere."""

    def stage(self, title: str, total: float | None = None) -> AbstractContextManager[None]:
        """One step of the work; `total` in whatever unit `advance` counts, None when it cannot be known."""

    def advance(self, amount: float = 1) -> None:
        """The current stage got on by `amount`."""

    def warn(self, sentence: str) -> None:
        """Something the user must see but that does not stop the build."""

    def note(self, sentence: str) -> None:
        """Something good to know."""


class SilentProgress:
    """No output; for library use and tests. `warnings` and `notes` keep what was said."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    @contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[None]:
        yield

    def advance(self, amount: float = 1) -> None: ...

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


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
