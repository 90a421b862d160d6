"""The layout of `llmops top`: tables of models, replicas and gateways that fit the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from llmops.cli.monitor.columns import BAD, GATEWAYS, MODELS, REPLICAS, table
from llmops.cli.monitor.snapshot import FleetSnapshot, ReplicaRow
from llmops.untrusted_text import escape_unsafe

#: Number of lines that are not rows: the title, blank lines and the headings of three tables.
FRAME = 7


def render_screen(board: FleetSnapshot, width: int, height: int | None = None) -> RenderableType:
    """Return the screen for a snapshot of the fleet.

    Args:
        board: The snapshot of the fleet.
        width: The width of the terminal in characters.
        height: Maximum number of lines, or None for no limit.
    """
    models = sorted(board.models, key=lambda row: (descending(row.requests_per_s), row.model))
    there = [one for one in board.gateways if not one.problem]
    away = [Text(escape_unsafe(f"{one.url}  {one.problem}"), BAD) for one in board.gateways if one.problem]
    away += [
        Text(escape_unsafe(f"{one.url}  cannot reach {server}: {why}"), BAD)
        for one in board.gateways
        for server, why in one.unreached.items()
    ]
    parts: list[RenderableType] = [_heading(board), ""]
    parts.append(table(MODELS, models, width) if models else Text("No model is known yet."))
    if board.replicas:
        room = None if height is None else height - FRAME - len(models) - len(board.gateways)
        parts += ["", *_replicas(board.replicas, width, room)]
    return Group(*parts, "", *([table(GATEWAYS, there, width)] if there else []), *away)


def _heading(board: FleetSnapshot) -> Text:
    away = sum(bool(one.problem) for one in board.gateways)
    count = len(board.gateways)
    said = [
        f"{count} gateway{'s' if count != 1 else ''}" + (f", {away} away" if away else ""),
        f"rates over {board.seconds:.0f} s" if board.seconds else "rates from the second poll on",
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
