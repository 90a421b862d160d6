"""Comparison of two runs, figure by figure."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from llmops.perf.report.document import Document
from llmops.perf.report.summary import LATENCIES, PERCENTILES
from llmops.perf.report.terminal import warning_line

RATES = (
    ("requests_per_second", "Requests/s"),
    ("output_tokens_per_second", "Output tokens/s"),
    ("goodput_per_second", "Goodput, req/s"),
)
#: Names of the options that may differ between comparable runs.
FREE = {"url", "model", "timeout", "verify", "simulated", "fleet"}


@dataclass(frozen=True)
class ComparisonRow:
    """A figure of two runs.

    Attributes:
        label: The name of the figure.
        first: The value in the first run.
        second: The value in the second run.
    """

    label: str
    first: float
    second: float

    @property
    def ratio(self) -> float | None:
        """Return the second value divided by the first, or None if the first is 0."""
        return self.second / self.first if self.first else None


def comparison_rows(first: Document, second: Document) -> list[ComparisonRow]:
    """Return a row for each figure that both runs have."""
    found = []
    for name, label in RATES:
        a, b = getattr(first.summary, name), getattr(second.summary, name)
        if a is not None and b is not None:
            found.append(ComparisonRow(label, a, b))
    for name, label in LATENCIES.items():
        a, b = getattr(first.summary, name), getattr(second.summary, name)
        if a is not None and b is not None:
            found += [ComparisonRow(f"{label} p{p}, ms", getattr(a, f"p{p}"), getattr(b, f"p{p}")) for p in PERCENTILES]
    return found


def differing_options(first: Document, second: Document) -> list[str]:
    """Return `name: A against B` for each option of the load that differs between the runs."""
    names = sorted((set(first.options) | set(second.options)) - FREE)
    pairs = [(name, first.options.get(name), second.options.get(name)) for name in names]
    return [f"{name}: {a} against {b}" for name, a, b in pairs if a != b]


def show_comparison(first: Document, second: Document, console: Console) -> None:
    """Print the options that differ, and a table of the figures."""
    for text in differing_options(first, second):
        console.print(warning_line(f"Different load – {text}"))
    if first.machine != second.machine:
        console.print(warning_line("The load generators ran on different machines, which may explain a difference."))
    table = Table(title=f"A {first.created} · B {second.created}", title_justify="left")
    for name in ("", "A", "B", "B/A"):
        table.add_column(name, justify="right" if name else "left")
    for row in comparison_rows(first, second):
        ratio = "–" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.label, f"{row.first:,.2f}", f"{row.second:,.2f}", ratio)
    console.print(table)
    console.print("A difference may be chance: repeat both runs to see how much the figures vary.", highlight=False)
