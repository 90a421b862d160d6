"""One self-contained HTML page per run: no script, no font, no address outside it."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from llmops.errors import InputError
from llmops.perf.report.document import Document
from llmops.perf.report.notes import notes
from llmops.perf.report.plots import plots
from llmops.perf.report.statistics import PERCENTILES, Summary
from llmops.perf.report.terminal import ROWS, milliseconds, rates

STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--soft:#667;--line:#e3e6ea;--a:#1a73e8;--b:#d9730d;--c:#2e8b57}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e8eb;--soft:#99a;--line:#2c323a;
--a:#6aa9ff;--b:#f0a35e;--c:#6fcf97}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
body{max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:1.8rem 0 .5rem}.soft,figcaption{color:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left;padding-left:0}th{font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1rem}
figure{margin:0}svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--line)}
.note{border-left:3px solid var(--b);padding-left:.7rem;margin:.4rem 0}code{font-size:.9em;overflow-wrap:anywhere}
.wide{overflow-x:auto}
"""


def write_page(document: Document, path: Path) -> None:
    """Write the page atomically. Raises InputError when `path` cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page(document), "utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error


def page(document: Document) -> str:
    """The HTML text."""
    model = str(document.options.get("model"))
    body = [
        f"<h1>{escape(model)}</h1>",
        f'<p class="soft">{escape(str(document.options.get("url")))} · {document.created}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in notes(document)),
        f"<h2>Latency, ms</h2>{_latencies(document.summary)}",
        f"<h2>Throughput</h2>{_table(rates(document.summary))}",
        _sweep(document),
        f'<h2>Plots</h2><div class="plots">{"".join(plot.svg() for plot in plots(document))}</div>',
        f"<h2>Load</h2>{_table(_given(document.options))}",
        f"<h2>Load generator's machine</h2>{_table([(k, str(v)) for k, v in document.machine.items()])}",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>llmops bench · {escape(model)}</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'


def _table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(label)}</td><td>{escape(value)}</td></tr>" for label, value in rows)
    return f'<div class="wide"><table>{cells}</table></div>'


def _grid(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _latencies(summary: Summary) -> str:
    rows = []
    for key, label in ROWS:
        value = getattr(summary, key)
        if value is not None:
            figures = (value.mean, value.p50, value.p90, value.p95, value.p99, value.maximum)
            rows.append([label, *(milliseconds(figure) for figure in figures), f"{value.count:,}"])
    return _grid(["", "mean", *(f"p{p}" for p in PERCENTILES), "max", "n"], rows)


def _sweep(document: Document) -> str:
    if not document.sweep:
        return ""
    rows = []
    for step in sorted(document.sweep, key=lambda step: step.rate):
        asked = [f"{step.rate:g}", f"{step.achieved_rate:g}", f"{100 * step.good_share:.1f} %"]
        rows.append([*asked, _ms(step.ttft_p99), _ms(step.e2e_p99), "yes" if step.holds else "no"])
    head = ["req/s asked", "achieved", "good", "TTFT p99, ms", "e2e p99, ms", "holds"]
    return f"<h2>Sweep</h2>{_grid(head, rows)}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _given(options: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in options.items() if value not in (None, [], {}, False, 0)]
