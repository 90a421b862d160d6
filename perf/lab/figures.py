"""Figures with their targets, and the Markdown they end up in."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from llmops.perf.report.document import machine
from tests.support.processes import Others

DISTURBED = 0.25  # cores
_kept: Path | None = None


def keep(path: Path) -> None:
    """From now on this process writes its section to `path` after every figure, so that its figures survive if it is
    ended."""
    global _kept
    _kept = path


@dataclass(frozen=True)
class Figure:
    """One measured value. `target` with `at` says what was aimed for; None: shown for comparison only."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at: Literal["most", "least"] = "most"

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.at == "most" else self.value >= self.target

    def text(self) -> str:
        """Return the figure with its aim, which is bold if it was missed."""
        text = f"{self.name}: {_number(self.value)} {self.unit}".rstrip()
        if self.target is None:
            return text
        return f"{text} ({_aim(self)})" if self.reached else f"{text} **({_aim(self)}: missed)**"


def place() -> str:
    """Return cores and processor of this machine."""
    host = machine()
    return f"{host['cores']} cores of {host['cpu']}"


@dataclass
class Section:
    """The figures of one script: what was done, with which command, and remarks."""

    title: str
    command: str
    text: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)  # what should have run and did not, with the reason
    when: str = ""  # UTC, of the end
    where: str = ""  # cores and processor
    seconds: float = 0.0
    others: float = 0.0  # cores that processes outside the benchmark used meanwhile
    done: float = 0.0  # share of the work at the last sign of progress, 0: not known

    def __enter__(self) -> Section:
        print(self.title, flush=True)
        self.where = place()
        self._begun, self._others = time.monotonic(), Others()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop_clock()
        print(f"  {self.seconds:.0f} s; others used {self.others:.2f} cores meanwhile", flush=True)

    def progress(self, done: float) -> None:
        """Say which share of the work is done, which tells how long this machine will need."""
        self.done = done
        self._keep()

    def _stop_clock(self) -> None:
        self.seconds = round(time.monotonic() - self._begun, 1)
        self.others = round(self._others.cores(), 3)
        self.when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())

    def _keep(self) -> None:
        if _kept is not None:
            self._stop_clock()
            self.write_json(_kept)

    def add(
        self, name: str, value: float, unit: str, target: float | None = None, at: Literal["most", "least"] = "most"
    ) -> None:
        """A figure; it replaces one of the same name, which came from fewer rounds."""
        figure = Figure(name, value, unit, target, at)
        names = [earlier.name for earlier in self.figures]
        if name in names:
            self.figures[names.index(name)] = figure
        else:
            self.figures.append(figure)
        self._keep()
        print(f"  {name}: {_number(value)} {unit} {_verdict(figure)}", flush=True)

    def note(self, text: str) -> None:
        """A sentence below the table."""
        self.notes.append(text)
        print(f"  {text}", flush=True)

    def lack(self, text: str) -> None:
        """What did not run, and why: a sentence that nobody should miss."""
        self.lacks.append(text)
        print(f"  {text}", flush=True)

    @property
    def missed(self) -> list[Figure]:
        """Figures that did not reach their aim."""
        return [figure for figure in self.figures if figure.reached is False]

    def markdown(self) -> str:
        """Return the section of the page: figures that have an aim, or all of them where none has."""
        lines = [f"## {self.title}", "", self.text, "", f"`{self.command}`", "", f"{self.circumstances()}.", ""]
        if self.figures:
            lines += ["| | measured | aim |", "|---|---|---|"]
            lines += [_row(figure) for figure in self.figures if figure.target is not None] or [
                _row(figure) for figure in self.figures
            ]
        remarks = [*self.lacks, *self.notes]
        lines += ["", *(f"- {remark}" for remark in remarks)] if remarks else []
        return "\n".join(lines) + "\n"

    def rows(self) -> list[list[str]]:
        """Return all figures as rows of a table: section, figure, value, unit, aim, when it was measured."""
        return [[self.title, one.name, repr(one.value), one.unit, _aim(one), self.when] for one in self.figures]

    def circumstances(self, here: str = "") -> str:
        """Return when and where this was measured, with a warning if other processes disturbed it.

        Args:
            here: A place that the page names by itself.
        """
        text = ", ".join(filter(None, [f"{self.when} UTC", "" if self.where == here else self.where]))
        return f"{text}; **others used {self.others:.2f} cores: worth little**" if self.others > DISTURBED else text

    def write_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(path)

    @classmethod
    def read_json(cls, path: Path) -> Section:
        """What `write_json` wrote."""
        data = json.loads(path.read_text())
        return cls(**{**data, "figures": [Figure(**figure) for figure in data["figures"]]})


def _row(figure: Figure) -> str:
    aim = _aim(figure) if figure.reached is not False else f"**{_aim(figure)}: not reached**"
    return f"| {figure.name} | {_number(figure.value)} {figure.unit} | {aim} |"


def _aim(figure: Figure) -> str:
    return "" if figure.target is None else f"{'≤' if figure.at == 'most' else '≥'} {_number(figure.target)}"


def _verdict(figure: Figure) -> str:
    return {None: "", True: "reached", False: "**not reached**"}[figure.reached]


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
