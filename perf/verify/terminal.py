"""Lines for a terminal: each check as it is done, the one that runs below them."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text

from llmops.perf.verify.findings import CheckOutcome
from llmops.perf.verify.report import VerifyReport, verdict_of

_COLOURS = {"works": "green", "refused": "dim", "unseen": "yellow", "wrong": "bold red"}
_NAME, _VERDICT = 41, 22


class TerminalProgress:
    """`Progress` on a rich console. A context manager: the spinner ends with it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console)
        self._part = ""

    def __enter__(self) -> TerminalProgress:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._status.stop()

    def begin(self, part: str, name: str) -> None:
        self._status.update(f"{part}: {name}")

    def result(self, result: CheckOutcome) -> None:
        if result.part != self._part:
            self._part = result.part
            self._console.print(Text(result.part, style="bold"))
        line = Text(f"  {result.name:<{_NAME}}")
        line.append(f"{verdict_of(result):<{_VERDICT}}", style=_COLOURS[result.finding.verdict])
        line.append(result.finding.detail)
        self._console.print(line, soft_wrap=True)


def show(report: VerifyReport, console: Console) -> None:
    """The summary, then one line per fault."""
    console.print(Text(report.summary()), soft_wrap=True)
    for fault in report.faults:
        console.print(Text(f"Fault: {fault}", style="bold red"), soft_wrap=True)
