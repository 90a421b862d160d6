"""Figures with their targets, and the Markdown they end up in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal


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


@dataclass
class Section:
    """The figures of one script: what was done, with which command, and remarks."""

    title: str
    command: str
    text: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(
        self, name: str, value: float, unit: str, target: float | None = None, at: Literal["most", "least"] = "most"
    ) -> None:
        figure = Figure(name, value, unit, target, at)
        self.figures.append(figure)
        print(f"  {name}: {_number(value)} {unit} {_verdict(figure)}", flush=True)

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.text, "", f"`{self.command}` ({self.seconds:.0f} s)", ""]
        if self.figures:
            lines += ["| | measured | aimed at | |", "|---|---|---|---|"]
            lines += [_row(figure) for figure in self.figures]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def _row(figure: Figure) -> str:
    aim = "" if figure.target is None else f"at {figure.at} {_number(figure.target)} {figure.unit}"
    return f"| {figure.name} | {_number(figure.value)} {figure.unit} | {aim} | {_verdict(figure)} |"


def _verdict(figure: Figure) -> str:
    return {None: "", True: "reached", False: "**not reached**"}[figure.reached]


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
