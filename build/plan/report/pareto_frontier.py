"""The trade between speed for one user and throughput per GPU: points no other point beats in both."""

from __future__ import annotations

from collections.abc import Iterable

from llmops.build.plan.search.layout_search import BatchCurve
from llmops.build.plan.speed.replica_model import OperatingPoint

MARKS = "●▲■◆"


def frontiers(curves: Iterable[BatchCurve]) -> dict[str, list[tuple[OperatingPoint, str]]]:
    """For each GPU kind the undominated (point, layout), from the fastest for a user to the most per GPU."""
    points: dict[str, list[tuple[OperatingPoint, str]]] = {}
    for curve in curves:
        points.setdefault(curve.gpu, []).extend((point, curve.layout) for point in curve.points)
    return {gpu: _frontier(found) for gpu, found in points.items()}


def _frontier(points: list[tuple[OperatingPoint, str]]) -> list[tuple[OperatingPoint, str]]:
    best, kept = 0.0, []
    for point, name in sorted(points, key=lambda pair: (-pair[0].per_user, -pair[0].per_gpu)):
        if point.per_gpu > best:
            best = point.per_gpu
            kept.append((point, name))
    return kept


def character_plot(lines: dict[str, list[tuple[OperatingPoint, str]]], width: int, height: int = 12) -> list[str]:
    """A plot in characters: tokens/s per user to the right, tokens/s per GPU upwards."""
    points = [point for line in lines.values() for point, _ in line]
    if not points:
        return []
    right, top = max(point.per_user for point in points), max(point.per_gpu for point in points)
    margin = len(f"{top:,.0f}") + 1
    inner = max(20, width - margin - 2)
    cells = [[" "] * inner for _ in range(height)]
    for mark, line in zip(_marks(), lines.values(), strict=False):
        for point, _ in line:
            column = min(inner - 1, int(point.per_user / right * (inner - 1)))
            row = height - 1 - min(height - 1, int(point.per_gpu / top * (height - 1)))
            cells[row][column] = mark
    rows = [f"{_tick(top, row, height):>{margin}}│{''.join(cells[row])}" for row in range(height)]
    axis = f"0{f'{right:,.0f} tokens/s per user':>{inner - 1}}"
    return [*rows, " " * margin + "└" + "─" * inner, " " * (margin + 1) + axis]


def _marks() -> Iterable[str]:
    while True:
        yield from MARKS


def _tick(top: float, row: int, height: int) -> str:
    return f"{top * (height - 1 - row) / (height - 1):,.0f}" if row in (0, height // 2, height - 1) else ""
