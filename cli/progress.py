"""The display of a build's progress on stderr: bars on a terminal, otherwise a line per stage."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from llmops.build.progress import Progress
from llmops.cli.output import MAX_LINE_LENGTH, console
from llmops.untrusted_text import escape_unsafe


def make_progress() -> Progress:
    """Return the progress display that fits standard error."""
    return RichProgress() if sys.stderr.isatty() else PlainProgress(sys.stderr)


class PlainProgress:
    """Progress for logs and pipes, one line per stage: `Reading weights ... 2.9 s`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    @contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[None]:
        start = time.monotonic()
        yield
        print(f"{title} ... {time.monotonic() - start:.1f} s", file=self.stream, flush=True)

    def advance(self, amount: float = 1) -> None: ...

    def warn(self, sentence: str) -> None:
        self.note(f"Warning: {sentence}")

    def note(self, sentence: str) -> None:
        print(escape_unsafe(sentence, MAX_LINE_LENGTH), file=self.stream, flush=True)


class RichProgress:
    """Progress on a terminal: a line per stage, with a bar while it runs and its time at the end."""

    def __init__(self) -> None:
        self.console = console(stderr=True)
        self._advance: Callable[[float], None] = lambda amount: None

    @contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[None]:
        from rich import progress as rich_progress
        from rich.text import Text

        class TimeLeft(rich_progress.TimeRemainingColumn):
            """A progress column with the remaining time as `0:01:10 left`.

            The column is empty if the amount of work is unknown or done.
            """

            def render(self, task: rich_progress.Task) -> Text:
                known = task.total is not None and task.time_remaining is not None and not task.finished
                return super().render(task) + Text(" left", "progress.remaining") if known else Text()

        columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TimeElapsedColumn(),
            TimeLeft(),
        )
        with rich_progress.Progress(*columns, console=self.console) as bar:
            task = bar.add_task(f"{title:<24}", total=total)
            self._advance = lambda amount: bar.advance(task, amount)
            yield
            bar.update(task, total=total or 1, completed=total or 1)

    def advance(self, amount: float = 1) -> None:
        self._advance(amount)

    def warn(self, sentence: str) -> None:
        self.console.print("Warning:", style="yellow", end=" ")
        self.note(sentence)

    def note(self, sentence: str) -> None:
        # escape markup, because the text may contain the name of a checkpoint
        self.console.print(escape_unsafe(sentence, MAX_LINE_LENGTH), highlight=False, markup=False)
