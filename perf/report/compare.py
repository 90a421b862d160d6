"""Comparison of two runs, with a verdict on which differences are more than chance."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from llmops.perf.report.document import Document
from llmops.perf.report.rate_intervals import rate_interval
from llmops.perf.report.summary import LATENCIES, PERCENTILES, Distribution
from llmops.perf.report.terminal import warning_line

RATES = (
    ("requests_per_second", "Requests/s"),
    ("output_tokens_per_second", "Output tokens/s"),
    ("goodput_per_second", "Goodput, req/s"),
)
#: Relative change below which a difference counts as none, even if it is statistically certain.
MIN_CHANGE = 0.02
#: Names of the options that may differ between comparable runs.
FREE = {"url", "model", "timeout", "verify", "simulated", "fleet"}


@dataclass(frozen=True)
class ComparisonRow:
    """A figure of two runs.

    Attributes:
        label: The name of the figure.
        first: The value in the first run.
        second: The value in the second run.
        higher_is_better: True if a higher value is better.
        certain: True if the difference is more than chance, or None if the runs are too short to
            tell.
    """

    label: str
    first: float
    second: float
    higher_is_better: bool
    certain: bool | None = None

    @property
    def change(self) -> float | None:
        """Return the relative change from the first to the second run, or None if the first is 0."""
        return self.second / self.first - 1 if self.first else None

    @property
    def verdict(self) -> str:
        small = self.change is not None and abs(self.change) < MIN_CHANGE
        if self.certain is False or self.first == self.second or small:
            return "same"
        if self.certain is None:
            return "unsure"
        return "better" if (self.second > self.first) == self.higher_is_better else "worse"


def comparison_rows(first: Document, second: Document) -> list[ComparisonRow]:
    """Return a row for each figure that both runs have."""
    found = []
    for name, label in RATES:
        a, b = getattr(first.summary, name), getattr(second.summary, name)
        if a is not None and b is not None:
            certain = _do_not_touch(rate_interval(first, name), rate_interval(second, name))
            found.append(ComparisonRow(label, a, b, True, certain))
    for name, label in LATENCIES.items():
        found += _latency_rows(label, getattr(first.summary, name), getattr(second.summary, name))
    return found


def _latency_rows(label: str, first: Distribution | None, second: Distribution | None) -> list[ComparisonRow]:
    if first is None or second is None:
        return []
    names = [f"p{p}" for p in PERCENTILES]
    return [
        ComparisonRow(f"{label} {n}, ms", getattr(first, n), getattr(second, n), False, _apart(first, second, n))
        for n in names
    ]


def _apart(first: Distribution, second: Distribution, name: str) -> bool | None:
    return _do_not_touch(first.interval.get(name), second.interval.get(name))


def _do_not_touch(a: Sequence[float] | None, b: Sequence[float] | None) -> bool | None:
    """Return True if two intervals are disjoint, or None if one of them is missing."""
    if a is None or b is None:
        return None
    return bool(a[1] < b[0] or b[1] < a[0])


def differing_options(first: Document, second: Document) -> list[str]:
    """Return `name: A against B` for each option of the load that differs between the runs."""
    names = sorted((set(first.options) | set(second.options)) - FREE)
    pairs = [(name, first.options.get(name), second.options.get(name)) for name in names]
    return [f"{name}: {a} against {b}" for name, a, b in pairs if a != b]


def show_comparison(first: Document, second: Document, console: Console) -> None:
    """Print the options that differ, and a table of the figures.

    Runs with different loads get no verdicts.
    """
    different = differing_options(first, second)
    for text in different:
        console.print(warning_line(f"Different load – {text}"))
    if first.machine != second.machine:
        console.print(warning_line("The load generators ran on different machines, which may explain a difference."))
    console.print(_table(first, second, verdicts=not different))
    console.print(
        f"“same”: less than {100 * MIN_CHANGE:g} % apart, or the 95 % confidence intervals touch; "
        "“unsure”: too few requests for an interval, or gaps within answers, for which there is no interval. One run "
        "of each cannot show drift between runs.",
        highlight=False,
    )


def _table(first: Document, second: Document, verdicts: bool) -> Table:
    table = Table(title=f"A {first.created} · B {second.created}", title_justify="left")
    for name in ("", "A", "B", "B/A", "change", "verdict"):
        table.add_column(name, justify="left" if name in ("", "verdict") else "right")
    for row in comparison_rows(first, second):
        ratio = "–" if row.change is None else f"{1 + row.change:.3f}"
        change = "–" if row.change is None else f"{100 * row.change:+.1f} %"
        table.add_row(
            row.label, f"{row.first:,.2f}", f"{row.second:,.2f}", ratio, change, row.verdict if verdicts else "–"
        )
    return table
