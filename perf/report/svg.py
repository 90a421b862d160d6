"""Plots as inline SVG: lines and points on linear axes, nothing to load, readable in light and dark."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40
COLOURS = ("var(--a)", "var(--b)", "var(--c)")
MAX_POINTS = 1500  # per series; more cannot be seen and make the page heavy

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line, or dots with `dots`; points in data units."""

    name: str
    points: Points
    dots: bool = False


@dataclass
class Plot:
    """A plot with its axis labels."""

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    y_max: float | None = None

    def svg(self) -> str:
        """The `<svg>` element; a sentence where there is nothing to draw."""
        series = [Series(s.name, _thin(s.points), s.dots) for s in self.series if s.points]
        if not series:
            return f"<figure><figcaption>{escape(self.title)}</figcaption><p>No data.</p></figure>"
        x, y = self._axes(series)
        parts = [_grid(x, y), *(_draw(s, x, y, COLOURS[i % 3]) for i, s in enumerate(series))]
        parts += [self._labels(), _legend(series) if len(series) > 1 else ""]
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}"'
        return f"<figure><figcaption>{escape(self.title)}</figcaption><svg {box}>{''.join(parts)}</svg></figure>"

    def _axes(self, series: list[Series]) -> tuple[Axis, Axis]:
        xs = [x for s in series for x, _ in s.points]
        ys = [y for s in series for _, y in s.points]
        x = Axis(min(0.0, *xs) if min(xs) < 0.5 * max(xs) else min(xs), max(xs), LEFT, WIDTH - RIGHT)
        return x, Axis(0.0, self.y_max or max(ys), HEIGHT - BOTTOM, TOP)

    def _labels(self) -> str:
        middle = (TOP + HEIGHT - BOTTOM) / 2
        centre = (LEFT + WIDTH - RIGHT) / 2
        return (
            f'<text x="{centre}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_label)}</text>'
            f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(self.y_label)}</text>'
        )


@dataclass(frozen=True)
class Axis:
    """Data from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """About five round values."""
        span = (self.high - self.low) or 1.0
        power = 10 ** math.floor(math.log10(span / 4))
        step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _thin(points: Points) -> Points:
    if len(points) <= MAX_POINTS:
        return points
    stride = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(i * stride)] for i in range(MAX_POINTS)]


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 4}" text-anchor="end">{tick:g}</text>')
    return "".join(parts)


def _draw(series: Series, x: Axis, y: Axis, colour: str) -> str:
    placed = [(x.at(a), y.at(min(b, y.high))) for a, b in series.points]
    if series.dots:
        return "".join(f'<circle cx="{a}" cy="{b}" r="2" fill="{colour}" fill-opacity=".5"/>' for a, b in placed)
    path = " ".join(f"{a},{b}" for a, b in placed)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def _legend(series: list[Series]) -> str:
    parts = []
    for index, item in enumerate(series):
        at = TOP + 12 + 15 * index
        parts.append(f'<rect x="{LEFT + 8}" y="{at - 8}" width="10" height="3" fill="{COLOURS[index % 3]}"/>')
        parts.append(f'<text x="{LEFT + 23}" y="{at - 3}">{escape(item.name)}</text>')
    return "".join(parts)
