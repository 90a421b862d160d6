"""One self-contained HTML page per run: no script, no font, no address outside it."""

from __future__ import annotations

import os
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from llmops.errors import InputError
from llmops.perf.bench import BenchOptions
from llmops.perf.report.document import Document
from llmops.perf.report.notes import notes
from llmops.perf.report.plots import plots
from llmops.perf.report.statistics import LATENCIES, PERCENTILES, Summary
from llmops.perf.report.terminal import milliseconds, rates

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#59636e;--line:#e3e6ea;--a:#1a73e8;--b:#c4600a;--c:#2e8b57}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e8eb;--soft:#a3adb8;--line:#2c323a;
--a:#6aa9ff;--b:#f0a35e;--c:#6fcf97}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
body{max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:1.8rem 0 .5rem}.soft,figcaption{color:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left;padding-left:0;font-weight:400}th{font-weight:600}
.key{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:1.2rem 0;padding:0}
.key div{border:1px solid var(--line);border-radius:6px;padding:.5rem .8rem}.key dd{margin:0;font-size:1.3rem}
.key dt{color:var(--soft);font-size:.85rem}
.plots,.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.4rem}
figure{margin:0}svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--line)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.band>rect{fill:transparent}.tip{visibility:hidden;pointer-events:none}.band:hover>.tip{visibility:visible}
.tip line{stroke:var(--fg)}.tip rect{fill:var(--bg);stroke:var(--soft)}svg .tip text{fill:var(--fg)}
.note{border-left:3px solid var(--b);padding-left:.7rem;margin:.4rem 0}code{font-size:.9em;overflow-wrap:anywhere}
.wide{overflow-x:auto}
@media(max-width:36rem){body{font-size:13px}td,th{padding:.25rem .35rem}td{overflow-wrap:anywhere}}
"""
# of the options, what no reader of a report asks for
UNSAID = {"url", "model", "timeout", "verify", "usage", "stream", "seed"}


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
        f'<p class="soft">llmops bench {escape(str(document.options.get("url")))} · {document.created}</p>',
        _key_figures(document.summary),
        *(f'<p class="note">{escape(note)}</p>' for note in notes(document)),
        f"<h2>Latency, ms</h2>{_latencies(document.summary)}",
        _sweep(document),
        f'<h2>Plots</h2><div class="plots">{"".join(plot.svg() for plot in plots(document))}</div>',
        f'<div class="pair"><section><h2>Throughput</h2>{_table(rates(document.summary))}</section>',
        f"<section><h2>Load</h2>{_table(_given(document.options))}",
        f"<h2>Machine of the load generator</h2>{_table(_machine(document))}</section></div>",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    # browsers ask for /favicon.ico otherwise, which is the one request this page would make
    head += '<link rel="icon" href="data:,">'
    head += f"<title>llmops bench · {escape(model)}</title><style>{STYLE}</style>"
    main = f"<main>{''.join(body)}</main>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{main}</body></html>'


def _key_figures(summary: Summary) -> str:
    """What most readers came for."""
    found = [("Output tokens/s", f"{summary.output_tokens_per_second:,.0f}")]
    for name, key, p in (("TTFT p50", "ttft", "p50"), ("TTFT p99", "ttft", "p99"), ("TPOT p50", "tpot", "p50")):
        value = getattr(summary, key)
        if value is not None:
            found.append((f"{name}, ms", milliseconds(getattr(value, p))))
    if summary.goodput_share is not None:
        found.append(("Goodput", f"{100 * summary.goodput_share:.1f} %"))
    found.append(("Failed", f"{summary.failed:,} of {summary.requests:,}"))
    return '<dl class="key">' + "".join(f"<div><dt>{n}</dt><dd>{v}</dd></div>" for n, v in found) + "</dl>"


def _machine(document: Document) -> list[tuple[str, str]]:
    return [(key.replace("_", " "), str(value)) for key, value in document.machine.items()]


def _table(rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(label)}</td><td>{escape(value)}</td></tr>" for label, value in rows)
    return f'<div class="wide"><table>{cells}</table></div>'


def _grid(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(_row(row) for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _row(cells: list[str]) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    return f'<tr><th scope="row">{escape(cells[0])}</th>{rest}</tr>'


def _latencies(summary: Summary) -> str:
    rows = []
    for key, label in LATENCIES.items():
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
    """The options that were set, by their names on the command line."""
    usual = {field.name: field.default for field in fields(BenchOptions)}
    said = {k: v for k, v in options.items() if k not in UNSAID and v not in (None, [], {}, usual.get(k))}
    return [(k.replace("_", " "), ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in said.items()]
