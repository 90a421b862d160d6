"""Where a build says how far it is. `cli/progress.py` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """How far a build is, and what it has to tell."""

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
