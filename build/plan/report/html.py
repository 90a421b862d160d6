"""The plan as one HTML file: no scripts, nothing loaded from elsewhere, readable in light and dark."""

from __future__ import annotations

from html import escape

from llmops.build.plan.report import text
from llmops.build.plan.report.pareto import frontiers
from llmops.build.plan.search import Plan
from llmops.build.plan.serving import Point
from llmops.build.plan.summary import caution

_COLOURS = ("#2a7ae2", "#d9480f", "#2b8a3e", "#9c36b5")
_WIDTH, _HEIGHT, _MARGIN = 760, 360, 60
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0;width:100%}
td,th{padding:.3rem .6rem;text-align:left;border-bottom:1px solid #8884}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}tr.best{font-weight:600}svg{max-width:100%;height:auto}
svg text{fill:currentColor;font-size:12px}.bar{background:#2a7ae2;height:.8em;display:inline-block}small{opacity:.7}
"""


def page(plan: Plan) -> str:
    """The whole document."""
    heading = escape(text.title(plan))
    sources = "".join(f"<li>{escape(gpu)}: {escape(source)}</li>" for gpu, source in plan.timing.items())
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{heading}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head><body><h1>{heading}</h1>"
        f"<h2>Layouts that hold the targets, by cost</h2>{_ranking(plan)}"
        f"<h2>Best: {escape(plan.best.gpu.name)} {escape(plan.best.name)}</h2>{_facts(plan)}"
        f"<h2>Memory of one GPU</h2>{_memory(plan)}"
        f"<h2>Tokens/s per GPU against tokens/s per user</h2>{_pareto(plan)}"
        f"<p>{escape(caution(plan) or '')}</p>"
        f"<h2>Rejected</h2>{_rejected(plan)}<h2>Where the times are from</h2><ul>{sources}</ul></body></html>\n"
    )


def _table(header: list[str], rows: list[list[str]], numbers: int, best: int | None = None) -> str:
    """The last `numbers` columns are right-aligned; `best` is the index of a highlighted row."""

    def cells(tag: str, values: list[str]) -> str:
        words = len(values) - numbers
        return "".join(
            f"<{tag}{'' if place < words else ' class=n'}>{escape(value)}</{tag}>" for place, value in enumerate(values)
        )

    body = "".join(
        f"<tr{' class=best' if place == best else ''}>{cells('td', row)}</tr>" for place, row in enumerate(rows)
    )
    return f"<table><tr>{cells('th', header)}</tr>{body}</table>"


def _ranking(plan: Plan) -> str:
    header = [
        "GPU",
        "layout",
        "GPUs",
        "$/h",
        "$/M in",
        "$/M out",
        "TTFT p95",
        "TPOT p95",
        "max req/s",
        "tok/s/GPU",
        "tok/s/user",
    ]
    rows = [
        [
            one.gpu.name,
            one.name if one.workers else f"{one.replicas}x {one.name}",
            str(one.gpus),
            f"{one.cost.hourly:,.2f}",
            f"{one.cost.input_per_million:.3f}",
            f"{one.cost.output_per_million:.3f}",
            text.milliseconds(one.point.ttft_p95),
            text.milliseconds(one.point.tpot_p95),
            f"{one.capacity:.1f}",
            f"{one.point.per_gpu:,.0f}",
            f"{one.point.per_user:,.0f}",
        ]
        for one in plan.candidates
    ]
    return _table(header, rows, numbers=9, best=0)


def _facts(plan: Plan) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in text.facts(plan))
    return f"<table>{rows}</table>"


def _memory(plan: Plan) -> str:
    total = plan.best.memory.total
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td class=n>{size}</td>"
        f"<td style='width:50%'><span class=bar style='width:{100 * bytes_ / total:.1f}%'></span></td></tr>"
        for name, size, bytes_ in text.memory_rows(plan.best)
    )
    return f"<table>{rows}<tr class=best><td>total</td><td class=n>{text.gigabytes(total)}</td><td></td></tr></table>"


def _pareto(plan: Plan) -> str:
    lines = frontiers(plan.curves)
    points = [point for line in lines.values() for point, _ in line]
    right, top = max(point.per_user for point in points), max(point.per_gpu for point in points)
    drawn = "".join(
        _line(gpu, line, right, top, _COLOURS[place % len(_COLOURS)], place)
        for place, (gpu, line) in enumerate(lines.items())
    )
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>{_axes(right, top)}{drawn}</svg>"


def _line(gpu: str, line: list[tuple[Point, str]], right: float, top: float, colour: str, place: int) -> str:
    places = [
        (*_place(point, right, top), f"{name}: {point.per_user:,.0f} / {point.per_gpu:,.0f}") for point, name in line
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    dots = "".join(
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}'><title>{escape(label)}</title></circle>"
        for x, y, label in places
    )
    legend = f"<text x='{_WIDTH - 120}' y='{20 + 16 * place}' style='fill:{colour}'>● {escape(gpu)}</text>"
    return f"<polyline points='{path}' fill='none' stroke='{colour}'/>{dots}{legend}"


def _place(point: Point, right: float, top: float) -> tuple[float, float]:
    x = _MARGIN + point.per_user / right * (_WIDTH - 2 * _MARGIN)
    return x, _HEIGHT - _MARGIN - point.per_gpu / top * (_HEIGHT - 2 * _MARGIN)


def _axes(right: float, top: float) -> str:
    bottom, far = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    return (
        f"<path d='M{_MARGIN} {_MARGIN}V{bottom}H{far}' fill='none' stroke='currentColor'/>"
        f"<text x='{far}' y='{bottom + 20}' text-anchor='end'>{right:,.0f} tokens/s per user</text>"
        f"<text x='{_MARGIN}' y='{bottom + 20}'>0</text>"
        f"<text x='4' y='{_MARGIN - 8}'>{top:,.0f} tokens/s per GPU</text>"
    )


def _rejected(plan: Plan) -> str:
    if not plan.rejections:
        return "<p>None.</p>"
    return _table(["GPU", "layout", "why"], [[one.gpu, one.layout, one.reason] for one in plan.rejections], numbers=0)
