"""The layout of `llmops top`: tables of models, replicas and gateways that fit the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from llmops.cli.monitor.columns import BAD, GATEWAYS, MODELS, REPLICAS, table
from llmops.cli.monitor.snapshot import FleetSnapshot, ModelRow, ReplicaRow
from llmops.untrusted_text import escape_unsafe

#: Number of lines that are not rows: the title, blank lines and the headings of three tables.
FRAME = 7


def render_screen(
    board: FleetSnapshot, view: ViewOptions, width: int, height: int | None = None, keys: str = ""
) -> RenderableType:
    """Return the screen for a snapshot of the fleet.

    Args:
        board: The snapshot of the fleet.
        view: The filters and the sort order that the user has chosen.
        width: The width of the terminal in characters.
        height: Maximum number of lines, or None for no limit.
        keys: The help line with the keys that can be pressed.
    """
    models = sorted(board.models, key=lambda row: (SORT_ORDERS[view.sort](row), row.model))
    there = [one for one in board.gateways if not one.problem]
    away = [Text(escape_unsafe(f"{one.url}  {one.problem}"), BAD) for one in board.gateways if one.problem]
    away += [
        Text(escape_unsafe(f"{one.url}  cannot reach {server}: {why}"), BAD)
        for one in board.gateways
        for server, why in one.unreached.items()
    ]
    parts: list[RenderableType] = [_heading(board, view, keys), ""]
    parts.append(table(MODELS, models, width) if models else Text("No model is known yet."))
    if view.replicas and board.replicas:
        room = None if height is None else height - FRAME - len(models) - len(board.gateways)
        parts += ["", *_replicas(board.replicas, width, room)]
    return Group(*parts, "", *([table(GATEWAYS, there, width)] if there else []), *away)


def _heading(board: FleetSnapshot, view: ViewOptions, keys: str) -> Text:
    away = sum(bool(one.problem) for one in board.gateways)
    count = len(board.gateways)
    said = [
        f"{count} gateway{'s' if count != 1 else ''}" + (f", {away} away" if away else ""),
        f"rates over {board.seconds:.0f} s" if board.seconds else "rates from the second poll on",
        f"by {view.sort}",
        *([keys] if keys else []),
    ]
    text = Text.assemble(("llmops top", "bold"), f"  {time.strftime('%H:%M:%S')}  ", "  ·  ".join(said))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _replicas(rows: Sequence[ReplicaRow], width: int, room: int | None) -> list[RenderableType]:
    """Return the table of replicas: replicas with problems first, then by load.

    `room` is the maximum number of lines, or None for no limit. If there are more replicas, the
    last line has the number of the others.
    """
    rows = sorted(
        rows, key=lambda row: (row.state in ("ready", ""), not row.doubts, descending(row.kv_use), row.replica)
    )
    shown = rows if room is None or len(rows) <= room else rows[: max(room - 1, 0)]
    more = len(rows) - len(shown)
    return [
        *([table(REPLICAS, shown, width)] if shown else []),
        *([Text(f"… and {more} more replicas", "dim")] if more else []),
    ]


def descending(value: float | None) -> float:
    """Return a sort key that puts the largest value first and None last."""
    return float("inf") if value is None else -value


# sort the values that need attention first
SORT_ORDERS: Mapping[str, Callable[[ModelRow], float]] = {
    "requests": lambda row: descending(row.requests_per_s),
    "waiting": lambda row: -sum(row.waiting.values()),
    "ttft": lambda row: descending(row.ttft_p95_s),
    "tpot": lambda row: descending(row.tpot_p95_ms),
    "goodput": lambda row: float("inf") if row.goodput is None else row.goodput,
    "tokens": lambda row: descending(row.tokens_out_per_s),
    "kv": lambda row: descending(row.kv_use),
    "failed": lambda row: descending(row.failed_per_s),
    "name": lambda row: 0.0,
}


@dataclass(frozen=True)
class ViewOptions:
    """The choices of the user: sorting and filters."""

    sort: str = "requests"
    replicas: bool = True

    def cycle_sort_order(self) -> ViewOptions:
        names = list(SORT_ORDERS)
        return replace(self, sort=names[(names.index(self.sort) + 1) % len(names)])

    def toggle_replicas(self) -> ViewOptions:
        return replace(self, replicas=not self.replicas)
