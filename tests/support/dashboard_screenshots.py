"""`python -m tests.support.dashboard_screenshots ENGINE FOLDER`: the dashboards as pictures for the docs.

Each panel's queries are answered by a real Prometheus that watches a stack with changing load; the lines are drawn by
our own plotter, as Grafana's look is Grafana's.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from llmops.html_pages.elements import STYLE
from llmops.html_pages.plots import HEIGHT, WIDTH, Plot, Points, Series
from llmops.output_files import write_text
from tests.faults.alerts.stack import PLAYED, SLOW, Watched, watched
from tests.support.mock_engine.llmops_engine.runtimes.faults import command_faults
from tests.support.prometheus.server import TICK, Prometheus

DASHBOARDS = Path("deploy", "dashboards")
# seconds that each kind of load lasts
STAGE = 25.0
# pixels: of Grafana's 24 columns together, of a row's heading, of a panel's title, and between panels
ACROSS, HEADING, TITLE, GAP = 3 * WIDTH, 40, 26, 18
MOST_LINES = 6
# what Grafana calls a unit -> what is written, and by what values are multiplied
UNITS = {
    "percentunit": ("%", 100.0),
    "s": ("s", 1.0),
    "ms": ("ms", 1.0),
    "reqps": ("per second", 1.0),
    "currencyUSD": ("$", 1.0),
    "bytes": ("MiB", 2.0**-20),
}

Lines = list[tuple[str, Points]]
Ask = Callable[[str], Sequence[Mapping[str, Any]]]


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(engine: Path, folder: Path) -> None:
    """ENGINE is any engine folder; only its tokenizer is used."""
    with watched(engine) as stack:
        begun = time.time()
        for stage in (_quiet, _impatient, _slow, _quiet):
            stage(stack)
            time.sleep(STAGE)
        ended = time.time()
        for path in sorted(DASHBOARDS.glob("*.json")):
            found = picture(json.loads(path.read_text()), _asking(stack.prometheus, begun, ended), begun)
            write_text(folder / f"{path.stem}.svg", found)
            click.echo(f"Wrote {folder / path.stem}.svg")


def _quiet(stack: Watched) -> None:
    command_faults(stack.faults)
    stack.told.values = {**PLAYED, "llmops_usage_lag_seconds": 0.5}
    stack.habits.alike, stack.habits.leaving, stack.habits.tokens = True, False, 20


def _impatient(stack: Watched) -> None:
    stack.habits.alike, stack.habits.leaving = False, True


def _slow(stack: Watched) -> None:
    command_faults(stack.faults, slow=SLOW / 25)
    stack.habits.leaving = False


def _asking(prometheus: Prometheus, begun: float, ended: float) -> Ask:
    def ask(query: str) -> Sequence[Mapping[str, Any]]:
        expression = query.replace("$__rate_interval", "5s").replace("$model", ".*")
        return prometheus.range(expression, begun, ended, TICK)

    return ask


def picture(dashboard: Mapping[str, Any], ask: Ask, begun: float) -> str:
    """An SVG of its own. `ask`: the answers to a range query, as Prometheus has them, times in Unix seconds."""
    parts, top = [], 0.0
    for row in _rows(dashboard["panels"]):
        heading, *panels = row
        parts.append(f'<text class="heading" x="0" y="{top + 26:.0f}">{escape(heading["title"])}</text>')
        top += HEADING
        height = max(TITLE + HEIGHT * panel["gridPos"]["w"] / 8 for panel in panels)
        for panel in panels:
            left, width = (ACROSS * panel["gridPos"][side] / 24 for side in ("x", "w"))
            parts.append(f'<text class="title" x="{left:.0f}" y="{top + 16:.0f}">{escape(panel["title"])}</text>')
            at = f'x="{left:.0f}" y="{top + TITLE:.0f}" width="{width - GAP:.0f}" height="{height - TITLE - GAP:.0f}"'
            parts.append(_panel(panel, _lines(panel, ask, begun), at))
        top += height
    look = f"{STYLE}svg svg{{width:auto;height:auto}}.heading{{font-size:20px;fill:var(--fg)}}"
    look += ".title{font-size:15px;fill:var(--fg)}.value{font-size:64px;fill:var(--a)}text{font-family:sans-serif}"
    ground = f'<rect width="{ACROSS}" height="{top:.0f}" fill="var(--bg)"/>'
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {ACROSS} {top:.0f}" width="{ACROSS}" height="{top:.0f}"'
    name = escape(dashboard["title"])
    return f"<svg {box}><title>{name}</title><style>{look}</style>{ground}{''.join(parts)}</svg>\n"


def _rows(panels: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Each heading with the panels under it."""
    row: list[Mapping[str, Any]] = []
    for panel in panels:
        if panel["type"] == "row" and row:
            yield row
            row = []
        row.append(panel)
    yield row


def _lines(panel: Mapping[str, Any], ask: Ask, begun: float) -> Lines:
    _, factor = _unit(panel)
    found: Lines = []
    for target in panel["targets"]:
        for series in ask(target["expr"]):
            labels = series["metric"]
            name = re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), target["legendFormat"]).strip()  # noqa: B023
            points = [(when - begun, factor * float(value)) for when, value in series["values"]]
            found.append((name, [(x, y) for x, y in points if y == y]))
    return found[:MOST_LINES]


def _unit(panel: Mapping[str, Any]) -> tuple[str, float]:
    return UNITS.get(panel["fieldConfig"]["defaults"]["unit"], ("", 1.0))


def _panel(panel: Mapping[str, Any], lines: Lines, at: str) -> str:
    unit, _ = _unit(panel)
    if panel["type"] == "stat" and lines:
        value = f"{unit}{lines[0][1][-1][1]:,.2f}" if unit == "$" else f"{lines[0][1][-1][1]:,.0f} {unit}"
        inner = f'<text class="value" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">{escape(value)}</text>'
        return f'<svg {at} viewBox="0 0 {WIDTH} {HEIGHT}">{inner}</svg>'
    if not unit and max((y for _, points in lines for _, y in points), default=0.0) >= 1e6:
        unit, lines = "millions", [(name, [(x, y / 1e6) for x, y in points]) for name, points in lines]
    plot = Plot(panel["title"], "s", unit, [Series(name, points) for name, points in lines])
    drawn = re.search(r"<svg (.*)</svg>", plot.svg(), re.S)
    if drawn is None:
        return f'<svg {at} viewBox="0 0 {WIDTH} {HEIGHT}"><text x="20" y="40">No data.</text></svg>'
    return f"<svg {at} {drawn[1]}</svg>"


if __name__ == "__main__":
    main()
