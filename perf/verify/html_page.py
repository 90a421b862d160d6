"""The report as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path

from llmops.html_pages.elements import data_table, key_figures, note
from llmops.html_pages.elements import render_page as whole
from llmops.output_files import write_text
from llmops.perf.verify.findings import PARTS
from llmops.perf.verify.report import VerifyReport, verdict_of

_TITLES = {
    "contract": "Contract", "answers": "Answers", "capacity": "Capacity", "speed": "Speed", "gateway": "OpenAI surface",
}  # fmt: skip


def write_page(report: VerifyReport, path: Path) -> None:
    """Write atomically. Raises InputError when `path` cannot be written."""
    write_text(path, page(report))


def page(report: VerifyReport) -> str:
    """The HTML text."""
    faults = len(report.faults)
    said = f"{faults} fault{'s' if faults > 1 else ''} found." if faults else "This deployment does what it promised."
    body = [
        f"<h1>{escape(report.model)}</h1>",
        f'<p class="soft">llmops verify {escape(report.address)} · {report.created}</p>',
        f'<p class="answer">{said}</p><p>{escape(report.summary())}</p>',
        key_figures(_figures(report)),
        *map(note, report.faults),
        *(_part(part, report) for part in PARTS),
    ]
    return whole(f"llmops verify · {report.model}", body)


def _figures(report: VerifyReport) -> list[tuple[str, str]]:
    figures = {one.name: one.finding.figures for one in report.results}
    found = [("Target", report.target), ("Device", report.device or "–")]
    agreement = figures.get("greedy answers", {}).get("agreement")
    if agreement is not None:
        found.append(("Tokens as the source's", f"{agreement:.1%}"))
    for name, label in (("one stream", "TPOT, 1 stream"), ("operating point", "TPOT, under load")):
        if "tpot" in figures.get(name, {}):
            found.append((f"{label}, ms", f"{1000 * figures[name]['tpot']:.1f}"))
    rate = figures.get("operating point", {}).get("tokens_per_second")
    return found if rate is None else [*found, ("Tokens/s under load", f"{rate:,.0f}")]


def _part(part: str, report: VerifyReport) -> str:
    rows = [
        [one.name, verdict_of(one), one.finding.detail, f"{one.seconds:.1f} s"]
        for one in report.results
        if one.part == part
    ]
    return f"<h2>{_TITLES[part]}</h2>{data_table(['', '', '', ''], rows, words=True)}" if rows else ""
