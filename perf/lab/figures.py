"""Figures of benchmarks with their goals, and the table of docs/performance.md that shows them."""

import time
from dataclasses import dataclass, field
from typing import Literal, Self

from tests.support.processes import Others

#: CPU cores that other processes may use during a benchmark. Above this, its figures are marked as
#: disturbed.
DISTURBED = 0.25


@dataclass(frozen=True)
class Figure:
    """A measured value with an optional goal.

    Attributes:
        name: The name of the figure.
        value: The measured value in `unit`.
        unit: The unit.
        target: The value to reach, or None for a figure that is shown for comparison.
        at: `most` if the target is the largest acceptable value, `least` if it is the smallest.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at: Literal["most", "least"] = "most"

    @property
    def reached(self) -> bool | None:
        """Return True if the figure reached its goal, or None if it has no goal."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at == "most" else self.value >= self.target

    def text(self) -> str:
        """Return the figure with its goal as Markdown. A missed goal is bold."""
        text = f"{self.name}: {_number(self.value)} {self.unit}".rstrip()
        if self.target is None:
            return text
        goal = f"{'≤' if self.at == 'most' else '≥'} {_number(self.target)}"
        return f"{text} ({goal})" if self.reached else f"{text} **({goal}: missed)**"


@dataclass
class Section:
    """The figures of one benchmark.

    The section is a context manager that measures the duration of the benchmark and the CPU use of
    other processes.

    Attributes:
        title: The name of the benchmark in the table.
        text: The conditions of the measurement, printed before the figures.
        figures: The figures in the order in which they were added.
        when: The UTC date on which the benchmark ended.
        seconds: The duration of the benchmark.
        others: The average number of CPU cores that other processes used during the benchmark.
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
        """Add a figure and print it. Replace an earlier figure of the same name."""
        figure = Figure(name, value, unit, target, at)
        self.figures = [*(one for one in self.figures if one.name != name), figure]
        print(f"  {figure.text()}", flush=True)

    def note(self, text: str) -> None:
        """Print a remark after the figures."""
        print(f"  {text}", flush=True)

    def row(self, command: str) -> str:
        """Return the section's row of the Markdown table.

        The row has the figures with a goal, or all figures if none has a goal.
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
