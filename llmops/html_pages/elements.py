"""Elements of a self-contained HTML page, for light and dark screens and for print.

The elements use no scripts, fonts or external addresses.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

#: The colours in CSS, which the reports share with the gateway's pages.
PALETTE = (Path(__file__).parent / "palette.css").read_text()
_RULES = """
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
body{max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:1.8rem 0 .5rem}.soft,figcaption{color:var(--soft)}
.answer{font-size:1.15rem;margin:1rem 0 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left;padding-left:0;font-weight:400}th{font-weight:600}
.words td,.words th{text-align:left;vertical-align:top}.words td:first-child{white-space:nowrap;color:var(--soft)}
.first td,.first th,.first th:first-child{font-weight:600}
.key{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:1.2rem 0;padding:0}
.key div{border:1px solid var(--line);border-radius:6px;padding:.5rem .8rem}.key dd{margin:0;font-size:1.3rem}
.key dt{color:var(--soft);font-size:.85rem}
.plots,.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.4rem}
figure{margin:0}svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--line)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.note{border-left:3px solid var(--b);padding-left:.7rem;margin:.4rem 0}code{font-size:.9em;overflow-wrap:anywhere}
.wide{overflow-x:auto}summary{cursor:pointer;color:var(--soft)}
@media(max-width:36rem){body{font-size:13px}td,th{padding:.25rem .35rem}td{overflow-wrap:anywhere}}
@media print{:root{color-scheme:light}body{margin:0;max-width:none;font-size:11px}
figure,tr,.key div{break-inside:avoid}h2{break-after:avoid}.plots{grid-template-columns:1fr 1fr}
details::details-content{content-visibility:visible;height:auto}summary{list-style:none}}
"""
STYLE = re.sub(r"/\*.*?\*/|\n\s*", "", PALETTE) + _RULES


def render_page(title: str, body: Iterable[str]) -> str:
    """Return an HTML page as text.

    Args:
        title: The title as plain text.
        body: The parts of the page as markup.
    """
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    # Without an icon, browsers request /favicon.ico, and the page must not send any request.
    head += '<link rel="icon" href="data:,">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    main = f"<main>{''.join(body)}</main>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{main}</body></html>'


def key_figures(figures: Sequence[tuple[str, str]]) -> str:
    """Return a box for each (name, value) of the most important figures."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return f'<dl class="key">{boxes}</dl>'


def note(text: str) -> str:
    """Return a highlighted paragraph with `text`, which is plain text."""
    return f'<p class="note">{escape(text)}</p>'


def key_value_table(rows: Iterable[tuple[str, str]], words: bool = False) -> str:
    """Return a table of (name, value) rows. `words` aligns the values as text instead of numbers."""
    cells = "".join(f"<tr><td>{escape(label)}</td><td>{escape(value)}</td></tr>" for label, value in rows)
    return f'<div class="wide"><table{" class=words" if words else ""}>{cells}</table></div>'


def data_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: bool = False, first: bool = False) -> str:
    """Return a table with the header `head`.

    Args:
        head: The titles of the columns.
        rows: The cells of each row as plain text.
        words: True to align the cells as text instead of numbers.
        first: True to highlight the first row.
    """
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(_row(row, first and not index) for index, row in enumerate(rows))
    return f'<div class="wide"><table{" class=words" if words else ""}><tr>{top}</tr>{body}</table></div>'


def _row(cells: Sequence[str], first: bool) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    return f'<tr{" class=first" if first else ""}><th scope="row">{escape(cells[0])}</th>{rest}</tr>'


def collapsible(summary: str, body: str) -> str:
    """Return a section that opens on a click, and is always open in print. `body` is markup."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
