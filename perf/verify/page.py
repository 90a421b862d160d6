"""The report as one self-contained HTML page, in the style of `llmops bench`."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from llmops.errors import InputError
from llmops.perf.report.html import STYLE
from llmops.perf.verify.base import PARTS, Result
from llmops.perf.verify.report import Report, verdict_of

_TITLES = {
    "contract": "Contract", "answers": "Answers", "capacity": "Capacity", "speed": "Speed", "gateway": "OpenAI surface",
}  # fmt: skip
_STYLE = """
.v{white-space:nowrap}td.d{text-align:left;overflow-wrap:anywhere}td.v{text-align:left}
.works{color:var(--c)}.wrong{color:#d1242f;font-weight:600}.refused,.unseen{color:var(--soft)}
.fault{border-left:3px solid #d1242f;padding-left:.7rem;margin:.4rem 0}
@media print{body{max-width:none;margin:0}}
"""


def write_page(report: Report, path: Path) -> None:
    """Write atomically. Raises InputError when `path` cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page(report), "utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error


def page(report: Report) -> str:
    """The HTML text."""
    name = escape(report.model)
    body = [
        f"<h1>{name}</h1>",
        f'<p class="soft">llmops verify {escape(report.address)} · {report.created}</p>',
        _answer(report),
        _key_figures(report),
        *(f'<p class="fault">{escape(fault)}</p>' for fault in report.faults),
        *(_part(part, report) for part in PARTS),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f'<link rel="icon" href="data:,"><title>llmops verify · {name}</title><style>{STYLE}{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(body)}</main></body></html>'


def _answer(report: Report) -> str:
    faults = len(report.faults)
    said = f"{faults} fault{'s' if faults > 1 else ''} found." if faults else "This deployment does what it promised."
    return f'<p class="{"wrong" if faults else "works"}">{said}</p><p>{escape(report.summary())}</p>'


def _key_figures(report: Report) -> str:
    figures = {one.name: one.finding.figures for one in report.results}
    found = [("Target", report.target), ("Device", report.device or "–")]
    agreement = figures.get("greedy answers", {}).get("agreement")
    if agreement is not None:
        found.append(("Tokens as the source's", f"{agreement:.1%}"))
    for name, label in (("one stream", "TPOT, 1 stream"), ("operating point", "TPOT, under load")):
        if "tpot" in figures.get(name, {}):
            found.append((f"{label}, ms", f"{1000 * figures[name]['tpot']:.1f}"))
    rate = figures.get("operating point", {}).get("tokens_per_second")
    if rate is not None:
        found.append(("Tokens/s under load", f"{rate:,.0f}"))
    cells = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in found)
    return f'<dl class="key">{cells}</dl>'


def _part(part: str, report: Report) -> str:
    rows = [_row(one) for one in report.results if one.part == part]
    if not rows:
        return ""
    head = '<tr><th scope="col"></th><th scope="col"></th><th scope="col"></th><th scope="col">s</th></tr>'
    return f'<h2>{_TITLES[part]}</h2><div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _row(result: Result) -> str:
    verdict = result.finding.verdict
    return (
        f'<tr><th scope="row">{escape(result.name)}</th><td class="v {verdict}">{verdict_of(result)}</td>'
        f'<td class="d">{escape(result.finding.detail)}</td><td>{result.seconds:.1f}</td></tr>'
    )
