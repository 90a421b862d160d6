"""Measured figures with their goals, and the table of docs/performance.md that shows them."""

import time
from dataclasses import dataclass, field
from typing import Literal, Self

from tests.support.processes import Others

#: CPU cores that other processes may use during a benchmark before its figures are marked as
#: disturbed.
DISTURBED = 0.25


@dataclass(frozen=True)
class Figure:
    """A measured value, with its goal or without one.

    Attributes:
        target: The value to reach, or None for a figure that is shown for comparison.
        at: Whether the target is the largest or the smallest acceptable value.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at: Literal["most", "least"] = "most"

    @property
    def reached(self) -> bool | None:
        """Return True if the goal was reached, or None if there is no goal."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at == "most" else self.value >= self.target

    def text(self) -> str:
        """Return the figure with its goal. A missed goal is bold."""
        text = f"{self.name}: {_number(self.value)} {self.unit}".rstrip()
        if self.target is None:
            return text
        goal = f"{'≤' if self.at == 'most' else '≥'} {_number(self.target)}"
        return f"{text} ({goal})" if self.reached else f"{text} **({goal}: missed)**"


@dataclass
class Section:
    """The figures of one benchmark.

    As a context manager it measures the time and the disturbance by others.

    Attributes:
        title: The name of the benchmark in the table.
        text: The conditions of the measurement, printed before the figures.
        when: The UTC time at which the benchmark ended.
        seconds: How long the benchmark ran.
        others: CPU cores that processes outside the benchmark used meanwhile.
    """

    title: str
    text: str = ""
    figures: list[Figure] = field(default_factory=list)
    when: str = ""
    seconds: float = 0.0
    others: float = 0.0

    def __enter__(self) -> Self:
        print(f"{self.title}. {self.text}", flush=True)
        self._begun, self._others = time.monotonic(), Others()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = round(time.monotonic() - self._begun, 1)
        self.others = round(self._others.cores(), 3)
        self.when = time.strftime("%Y-%m-%d", time.gmtime())
        print(f"  {self.seconds:.0f} s; other processes used {self.others:.2f} cores meanwhile", flush=True)

    def add(
        self, name: str, value: float, unit: str, target: float | None = None, at: Literal["most", "least"] = "most"
    ) -> None:
        """Add a figure and print it. A figure of the same name is replaced."""
        figure = Figure(name, value, unit, target, at)
        self.figures = [*(one for one in self.figures if one.name != name), figure]
        print(f"  {figure.text()}", flush=True)

    def note(self, text: str) -> None:
        """Print a remark below the figures."""
        print(f"  {text}", flush=True)

    def row(self, command: str) -> str:
        """Return the section's row of the table.

        It has the figures with a goal, or all figures if none has a goal.
        """
        shown = [one for one in self.figures if one.target is not None] or self.figures
        when = self.when
        if self.others > DISTURBED:
            when += f"; **disturbed: other processes used {self.others:.2f} cores**"
        return f"| {self.title} | {'<br>'.join(one.text() for one in shown)} | `{command}` | {when} |"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
