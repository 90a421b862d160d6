"""Reports of a verification: JSON, terminal, HTML page, and metrics for a node exporter."""

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from rich.console import Console
from rich.status import Status
from rich.text import Text

from llmops import __version__
from llmops.gateway.telemetry.metric_definitions import EVAL_BASELINE, EVAL_SCORE, MetricDefinition
from llmops.html_pages.elements import data_table, note
from llmops.html_pages.elements import render_page as whole
from llmops.output_files import write_text
from llmops.perf.verify.findings import PARTS, CheckOutcome, Verdict

FORMAT = "llmops-verify/1"
# The verdicts on capabilities, in words for readers.
SAID: dict[Verdict, str] = {
    "works": "works",
    "refused": "refused as announced",
    "unseen": "could not be seen",
    "wrong": "WRONG",
}


@dataclass
class VerifyReport:
    """The report of a verification.

    Attributes:
        model: The served name of the model.
        address: The address at which the model was tested.
        target: The target of the engine's build, or `gateway`.
        device: The name of the engine's device.
        promised: True if an engine folder defined the expected properties.
        results: The outcome of each check, in order.
        seconds: The duration of the verification.
        created: The UTC time of the report.
    """

    model: str
    address: str
    target: str
    device: str
    promised: bool
    results: list[CheckOutcome] = field(default_factory=list)
    seconds: float = 0.0
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    @property
    def faults(self) -> list[str]:
        """Return a clause for each fault."""
        return [result.fault for result in self.results if result.fault is not None]

    def summary(self) -> str:
        """Return a summary of one line."""
        count = Counter(result.finding.verdict for result in self.results)
        parts = [f"{count[verdict]} {said}" for verdict, said in SAID.items() if count[verdict]]
        return f"{len(self.results)} checks of {self.model} in {self.seconds:.0f} s: {', '.join(parts)}."

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["results"] = [
            {"part": one.part, "name": one.name, "seconds": round(one.seconds, 3), **asdict(one.finding)}
            for one in self.results
        ]
        return {"format": FORMAT, "llmops": __version__, "passed": not self.faults, "faults": self.faults, **data}


def verdict_of(result: CheckOutcome) -> str:
    """Return the verdict on a capability, which is ANNOUNCED AND WRONG for a broken promise."""
    if result.finding.verdict == "wrong" and result.part == "contract":
        return "ANNOUNCED AND WRONG"
    return SAID[result.finding.verdict]


_COLOURS = {"works": "green", "refused": "dim", "unseen": "yellow", "wrong": "bold red"}
_NAME, _VERDICT = 41, 22


class TerminalProgress:
    """Progress on a rich console. The context manager ends the spinner."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console)
        self._part = ""

    def __enter__(self) -> Self:
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
    """Print the summary, and one line per fault."""
    console.print(Text(report.summary()), soft_wrap=True)
    for fault in report.faults:
        console.print(Text(f"Fault: {fault}", style="bold red"), soft_wrap=True)


#: Value of the label `eval` for the share of the source's greedy answers that the deployment
#: reproduces.
GREEDY = "greedy"


def write_textfile(report: VerifyReport, folder: Path) -> Path | None:
    """Write a file with the model's metrics into `folder`, atomically, and return its path.

    Return None if the verification measured nothing.

    Raises:
        OSError: The file cannot be written.
    """
    figures = next((one.finding.figures for one in report.results if "agreement" in one.finding.figures), None)
    if figures is None:
        return None
    registry = CollectorRegistry()
    for name, figure in ((EVAL_SCORE, "agreement"), (EVAL_BASELINE, "agreement_when_built")):
        _gauge(name, registry).labels(report.model, GREEDY).set(figures[figure])
    file = folder / f"llmops_eval_{quote(report.model, safe='')}.prom"
    write_to_textfile(str(file), registry)
    return file


def _gauge(name: MetricDefinition, registry: CollectorRegistry) -> Gauge:
    return Gauge(name.name, name.meaning, name.labels, registry=registry)


def write_page(report: VerifyReport, path: Path) -> None:
    """Write the HTML report to `path` atomically.

    Raise InputError if the file cannot be written.
    """
    write_text(path, page(report))


def page(report: VerifyReport) -> str:
    """Return the HTML report as text."""
    faults = len(report.faults)
    said = f"{faults} fault{'s' if faults > 1 else ''} found." if faults else "This deployment does what it promised."
    facts = (report.address, report.target, report.device, report.created)
    body = [
        f"<h1>{escape(report.model)}</h1>",
        f'<p class="soft">llmops verify {escape(" · ".join(filter(None, facts)))}</p>',
        f'<p class="answer">{said}</p><p>{escape(report.summary())}</p>',
        *map(note, report.faults),
        *(_part(part, report) for part in PARTS),
    ]
    return whole(f"llmops verify · {report.model}", body)


def _part(part: str, report: VerifyReport) -> str:
    rows = [
        [one.name, verdict_of(one), one.finding.detail, f"{one.seconds:.1f} s"]
        for one in report.results
        if one.part == part
    ]
    return f"<h2>{part.capitalize()}</h2>{data_table(['', '', '', ''], rows, words=True)}" if rows else ""
