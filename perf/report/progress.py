"""The progress bar of `llmops bench`."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from llmops.perf import options
from llmops.perf.load.sweep import SweepStep
from llmops.perf.records import Record

#: Seconds between two redraws. Redrawing costs CPU that the load generator needs.
REFRESH = 0.2


class Bar(options.BenchProgress):
    """A progress bar in the terminal with the phase, and the numbers of tokens and failures."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self._progress = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
            # Without a terminal, rich would print an empty line at the end.
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("connecting", total=None, text="")
        self._drawn = 0.0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def phase(self, name: str, sessions: int | None, seconds: float | None) -> None:
        self._sessions = sessions
        self._begun, self._done, self._failed, self._tokens = time.perf_counter(), 0, 0, 0
        self._progress.reset(self._task, description=name, total=sessions or seconds, text="")
        self._progress.refresh()

    def record(self, record: Record) -> None:
        self._done += 1
        self._failed += record.error is not None
        self._tokens += record.tokens_out
        now = time.perf_counter()
        if now - self._drawn < REFRESH:
            return
        self._drawn, elapsed = now, now - self._begun
        text = f"{self._done} requests, {self._tokens / max(elapsed, 1e-9):,.0f} tok/s"
        text += f", {self._failed} failed" if self._failed else ""
        completed = min(self._done, self._sessions) if self._sessions else elapsed
        self._progress.update(self._task, completed=completed, text=text)
        self._progress.refresh()

    def step(self, step: SweepStep) -> None:
        verdict = "holds" if step.holds else "does not hold"
        self._progress.console.print(f"{step.rate:g} req/s {verdict}: {100 * step.good_share:.1f} % good")
