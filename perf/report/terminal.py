"""The report of a run as tables in the terminal."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmops.perf.report.document import Document
from llmops.perf.report.run_warnings import list_warnings
from llmops.perf.report.summary import LATENCIES, PERCENTILES, Distribution, Summary

LATENCY_COLUMNS = ("", "mean", *(f"p{p}" for p in PERCENTILES), "max", "n")


def show(document: Document, console: Console) -> None:
    """Print the latencies, the rates and the warnings."""
    summary = document.summary
    console.print(figures_table(latency_rows(summary), LATENCY_COLUMNS, "Latency, ms"))
    console.print(figures_table(rates(summary)))
    if document.sweep:
        columns = ("req/s asked", "achieved", "good", "TTFT p99", "e2e p99", "holds")
        console.print(figures_table(sweep_rows(document), columns, "Sweep"))
    for note in list_warnings(document):
        console.print(warning_line(note))


def warning_line(text: str) -> Text:
    """Return `text` as a line that begins with a coloured mark."""
    return Text.assemble(("! ", "yellow"), text)


def figures_table(rows: Iterable[Sequence[str]], columns: Sequence[str] = ("", ""), title: str | None = None) -> Table:
    """Return a table of figures.

    If the first column has no name, it holds the labels of the rows.
    """
    has_header = any(columns)
    box = SIMPLE_HEAD if has_header else SIMPLE
    table = Table(title=title, title_justify="left", title_style="bold", show_header=has_header, box=box)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number or name else "left")
    for cells in rows:
        table.add_row(*cells)
    return table


def latency_rows(summary: Summary) -> list[list[str]]:
    """Return a row of cells for each latency, in the order of LATENCY_COLUMNS."""
    rows = []
    for key, label in LATENCIES.items():
        value: Distribution | None = getattr(summary, key)
        if value is not None:
            figures = (value.mean, value.p50, value.p90, value.p95, value.p99, value.maximum)
            rows.append([label, *(milliseconds(figure) for figure in figures), f"{value.count:,}"])
    return rows


def milliseconds(value: float) -> str:
    """Format milliseconds with about four digits: 0.28, 14.03, 538.1, 1,465."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def rates(summary: Summary) -> list[tuple[str, str]]:
    """Return the label and value of each figure that is not a latency."""
    counted = {"chunks": " (counted chunks)", "mixed": " (partly counted chunks)"}.get(summary.tokens_source, "")
    rows = [
        ("Requests", f"{summary.completed} completed, {summary.failed} failed, {summary.cancelled} cancelled"),
        ("Measured for", f"{summary.seconds:,.2f} s"),
        ("Requests/s", f"{summary.requests_per_second:,.3f}"),
        (f"Output tokens/s{counted}", f"{summary.output_tokens_per_second:,.1f}"),
    ]
    if summary.total_tokens_per_second is not None:
        rows.append(("Input + output tokens/s", f"{summary.total_tokens_per_second:,.1f}"))
    if summary.mean_input is not None:
        rows.append(("Mean input tokens", f"{summary.mean_input:,.1f}"))
    if summary.mean_output is not None:
        rows.append((f"Mean output tokens{counted}", f"{summary.mean_output:,.1f}"))
    if summary.goodput_share is not None:
        rows.append(("Goodput", f"{summary.goodput_per_second:,.3f} req/s ({100 * summary.goodput_share:.1f} %)"))
    rows += [
        (f"Met {objective}", f"{100 * share:.2f} % of the requests")
        for objective, share in summary.attained.items()
        if share is not None
    ]
    if summary.tool_calls:
        rows.append(("Tool calls", str(summary.tool_calls)))
    rows += [(f"Error {kind}", str(count)) for kind, count in sorted(summary.errors.items())]
    if summary.own_cpu_share:
        rows.append(("Load generator", generator_cost(summary)))
    return rows


def generator_cost(summary: Summary) -> str:
    """Return the load generator's own CPU use as text."""
    per_token = f", {summary.own_cpu_us_per_token:.1f} µs/token" if summary.own_cpu_us_per_token is not None else ""
    return f"{100 * summary.own_cpu_share:.1f} % of a core{per_token}"


def sweep_rows(document: Document) -> list[list[str]]:
    """Return a row of cells for each rate that a sweep tried, by increasing rate."""
    rows = []
    for step in sorted(document.sweep, key=lambda step: step.rate):
        latencies = ("–" if value is None else f"{value:,.1f}" for value in (step.ttft_p99, step.e2e_p99))
        rates = (f"{step.rate:g}", f"{step.achieved_rate:g}", f"{100 * step.good_share:.1f} %")
        rows.append([*rates, *latencies, "yes" if step.holds else "no"])
    return rows
