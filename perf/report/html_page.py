"""The HTML report of a run: one self-contained page without scripts, fonts or external addresses."""

from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from llmops.html_pages.elements import data_table, key_figures, key_value_table, note
from llmops.html_pages.elements import render_page as whole
from llmops.output_files import write_text
from llmops.perf.options import BenchOptions
from llmops.perf.report.document import Document
from llmops.perf.report.plots import plots
from llmops.perf.report.run_warnings import list_warnings
from llmops.perf.report.summary import Summary
from llmops.perf.report.terminal import LATENCY_COLUMNS, latency_rows, milliseconds, rates, sweep_rows

#: Names of the options that the page leaves out, because readers do not need them.
UNSAID = {"simulated", "url", "model", "timeout", "verify", "usage", "stream", "seed"}


def write_page(document: Document, path: Path) -> None:
    """Write the HTML report to `path` atomically.

    Raise InputError if the file cannot be written.
    """
    write_text(path, render_page(document))


def render_page(document: Document) -> str:
    """Return the HTML report of a run as text."""
    model = str(document.options.get("model"))
    body = [
        f"<h1>{escape(model)}</h1>",
        f'<p class="soft">llmops {_tool(document)} · {document.created}</p>',
        key_figures(_key_figures(document.summary)),
        *(note(text) for text in list_warnings(document)),
        _fleet(document),
        f"<h2>Latency, ms</h2>{data_table(LATENCY_COLUMNS, latency_rows(document.summary))}",
        _sweep(document),
        f'<h2>Plots</h2><div class="plots">{"".join(plot.svg() for plot in plots(document))}</div>',
        f'<div class="pair"><section><h2>Throughput</h2>{key_value_table(rates(document.summary))}</section>',
        f"<section><h2>Load</h2>{key_value_table(_given(document.options))}",
        f"<h2>Machine of the load generator</h2>{key_value_table(_machine(document))}</section></div>",
    ]
    return whole(f"llmops {_tool(document).split()[0]} · {model}", body)


def _tool(document: Document) -> str:
    if "simulated" in document.options:
        return "simulate"
    return f"bench {escape(str(document.options.get('url')))}"


def _fleet(document: Document) -> str:
    """Return the section with the figures that only a simulation has, or an empty text."""
    figures = document.options.get("simulated")
    return (
        f"<h2>Fleet</h2>{key_value_table([(k.replace('_', ' '), str(v)) for k, v in figures.items()])}"
        if figures
        else ""
    )


def _key_figures(summary: Summary) -> list[tuple[str, str]]:
    """Return the name and value of each of the most important figures."""
    found = [("Output tokens/s", f"{summary.output_tokens_per_second:,.0f}")]
    for name, key, p in (("TTFT p50", "ttft", "p50"), ("TTFT p99", "ttft", "p99"), ("TPOT p50", "tpot", "p50")):
        value = getattr(summary, key)
        if value is not None:
            found.append((f"{name}, ms", milliseconds(getattr(value, p))))
    if summary.goodput_share is not None:
        found.append(("Goodput", f"{100 * summary.goodput_share:.1f} %"))
    found.append(("Failed", f"{summary.failed:,} of {summary.requests:,}"))
    return found


def _machine(document: Document) -> list[tuple[str, str]]:
    return [(key.replace("_", " "), str(value)) for key, value in document.machine.items()]


def _sweep(document: Document) -> str:
    if not document.sweep:
        return ""
    head = ["req/s asked", "achieved", "good", "TTFT p99, ms", "e2e p99, ms", "holds"]
    return f"<h2>Sweep</h2>{data_table(head, sweep_rows(document))}"


def _given(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the options that were set, by their names on the command line."""
    usual = {field.name: field.default for field in fields(BenchOptions)}
    said = {k: v for k, v in options.items() if k not in UNSAID and v not in (None, [], {}, usual.get(k))}
    return [(k.replace("_", " "), ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in said.items()]
