"""Interface through which a build reports its progress.

`cli/progress.py` shows it in the terminal.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """A receiver of stages, warnings and notes."""

    def stage(self, title: str, total: float | None = None) -> AbstractContextManager[None]:
        """Begin a stage that ends with the `with` block.

        `total` is in the unit of `advance`, None if unknown.
        """

    def advance(self, amount: float = 1) -> None:
        """Move the current stage forward by `amount`."""

    def warn(self, sentence: str) -> None:
        """Show a sentence that the user must see but that does not stop the build."""

    def note(self, sentence: str) -> None:
        """Show a sentence that is good to know."""


class SilentProgress:
    """A receiver without output, for library use and tests.

    `warnings` and `notes` keep what was reported.
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
