"""The interface through which a build reports its progress.

`cli/progress.py` shows it in the terminal.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """A receiver of stages, warnings and notes."""

    def stage(self, title: str, total: float | None = None) -> AbstractContextManager[None]:
        """Return a context manager for a stage of the build, which ends with the `with` block.

        `total` is the amount of work in the unit of `advance`, or None if unknown.
        """

    def advance(self, amount: float = 1) -> None:
        """Move the current stage forward by `amount`."""

    def warn(self, sentence: str) -> None:
        """Show a warning, a full sentence. The build goes on."""

    def note(self, sentence: str) -> None:
        """Show a note, a full sentence that needs no action."""


class SilentProgress:
    """A receiver without output, for library use and tests.

    `warnings` and `notes` collect the sentences that the build reported.
    """

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
