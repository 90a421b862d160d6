"""Plots as inline SVG without scripts: lines and points on linear axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 26, 46
COLOURS = tuple(f"var(--{letter})" for letter in "abcdefg")
#: Maximum number of points per series. More points than pixels cannot be told apart and make the
#: page heavy.
MAX_POINTS = 1500
BAR_WIDTH, LEGEND_COLUMNS = 1000, 4

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A linear axis that maps data from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of `value`, which is in data units."""
        return round(self.start + (value - self.low) / self._span * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return up to six round values within the axis, for its labels."""
        power = 10 ** math.floor(math.log10(self._span / 4))
        step = next(power * m for m in (1, 2, 5, 10) if self._span / (power * m) <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    @property
    def _span(self) -> float:
        return (self.high - self.low) or 1.0


def format_number(value: float) -> str:
    """Format a number with at most four significant digits: 0.28, 14.03, 538.1, 12,500."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.4g}'):g}"


@dataclass(frozen=True)
class Series:
    """A named line or scatter of points.

    Attributes:
        name: The name in the legend.
        points: The points (x, y) in data units, sorted by x for a line.
        dots: True to draw separate dots instead of a line.
        labels: A text for each point. A line with labels has a dot for each point, with the text as
            the dot's tooltip.
    """

    name: str
    points: Points
    dots: bool = False
    labels: tuple[str, ...] = ()


@dataclass
class Plot:
    """A plot.

    Attributes:
        title: The caption.
        x_label: The name and unit of the x axis.
        y_label: The name and unit of the y axis.
        series: The lines and scatters.
        y_max: The largest y that is drawn in data units, or None to fit the points.
        marks: The (x, label) of each vertical line.
    """

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    y_max: float | None = None
    marks: list[tuple[float, str]] = field(default_factory=list)

    def svg(self) -> str:
        """Return the `<figure>` element. A plot without points shows a sentence."""
        series = [s if s.labels else replace(s, points=_thin(s.points)) for s in self.series if s.points]
        if not series:
            return f"<figure><figcaption>{escape(self.title)}</figcaption><p>No data.</p></figure>"
        x, y = self._axes(series)
        parts = [_grid(x, y), *(_draw(s, x, y, _colour(i)) for i, s in enumerate(series)), self._marks(x)]
        parts += [self._labels(), _legend(series) if len(series) > 1 else ""]
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self._description(series))}"'
        return f"<figure><figcaption>{escape(self.title)}</figcaption><svg {box}>{''.join(parts)}</svg></figure>"

    def _axes(self, series: list[Series]) -> tuple[Axis, Axis]:
        xs = [x for s in series for x, _ in s.points]
        ys = [y for s in series for _, y in s.points]
        x = Axis(min(0.0, *xs) if min(xs) < 0.5 * max(xs) else min(xs), max(xs), LEFT, WIDTH - RIGHT)
        return x, Axis(0.0, self.y_max or max(ys), HEIGHT - BOTTOM, TOP)

    def _labels(self) -> str:
        centre = (LEFT + WIDTH - RIGHT) / 2
        return (
            f'<text x="{centre}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x_label)}</text>'
            f'<text x="4" y="13">{escape(self.y_label)}</text>'
        )

    def _marks(self, x: Axis) -> str:
        parts, free = (
            [],
            8 + 6.5 * len(self.y_label),
        )  # The labels of the marks are on the same line as the label of the y axis.
        for value, label in sorted(self.marks):
            if not x.low <= value <= x.high:
                continue
            at = x.at(value)
            parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            half = 4.2 * len(label)
            if at - half > free and at + half < WIDTH:
                parts.append(f'<text x="{at}" y="{TOP - 5}" text-anchor="middle">{escape(label)}</text>')
                free = at + half
        return "".join(parts)

    def _description(self, series: list[Series]) -> str:
        """Return a description of the plot for screen readers, with the range of each series."""
        said = [f"{self.title}; {self.x_label} against {self.y_label}"]
        for item in series:
            ys = [y for _, y in item.points]
            said.append(
                f"{item.name} from {format_number(min(ys))} to {format_number(max(ys))}, last {format_number(ys[-1])}"
            )
        return "; ".join([*said, *(f"{label} at {format_number(value)}" for value, label in self.marks)])


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
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{format_number(tick)}</text>')
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{format_number(tick)}</text>')
    return "".join(parts)


def _draw(series: Series, x: Axis, y: Axis, colour: str) -> str:
    placed = [(x.at(a), y.at(min(b, y.high))) for a, b in series.points]
    if series.dots:
        return "".join(f'<circle cx="{a}" cy="{b}" r="2" fill="{colour}" fill-opacity=".5"/>' for a, b in placed)
    path = " ".join(f"{a},{b}" for a, b in placed)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    dots = [
        f'<circle cx="{a}" cy="{b}" r="3" fill="{colour}"><title>{escape(label)}</title></circle>'
        for (a, b), label in zip(placed, series.labels, strict=False)
    ]
    return line + "".join(dots)


def _legend(series: list[Series]) -> str:
    parts, at = [], WIDTH - RIGHT
    for index, item in reversed(list(enumerate(series))):
        at -= 22 + 7 * len(item.name)
        parts.append(f'<rect x="{at}" y="7" width="12" height="4" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{at + 16}" y="13">{escape(item.name)}</text>')
    return "".join(parts)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def stacked_bar(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """Return one stacked bar as a `<figure>`, with a legend below.

    Args:
        title: The caption.
        parts: The (name, size, size as text) of each part. The width of a part is proportional to
            its size. The last part is the remainder, and is drawn pale.
    """
    total, at, bars, legend = sum(size for _, size, _ in parts) or 1.0, 0.0, [], []
    for index, (name, size, text) in enumerate(parts):
        width = BAR_WIDTH * size / total
        look = 'fill="var(--line)"' if index == len(parts) - 1 else f'fill="{_colour(index)}"'
        words = escape(f"{name}: {text}")
        bars.append(f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="34" {look}><title>{words}</title></rect>')
        column, row = index % LEGEND_COLUMNS, index // LEGEND_COLUMNS
        x, y = column * BAR_WIDTH / LEGEND_COLUMNS, 50 + 20 * row
        legend.append(f'<rect x="{x:.0f}" y="{y}" width="11" height="11" {look}/>')
        legend.append(f'<text x="{x + 17:.0f}" y="{y + 10}">{words}</text>')
        at += width
    height = 50 + 20 * -(-len(parts) // LEGEND_COLUMNS)
    spoken = escape("; ".join([title, *(f"{name} {text}" for name, _, text in parts)]))
    box = f'viewBox="0 0 {BAR_WIDTH} {height}" role="img" aria-label="{spoken}"'
    return f"<figure><figcaption>{escape(title)}</figcaption><svg {box}>{''.join(bars + legend)}</svg></figure>"
