"""How `llmops top` looks: models, their replicas, and the gateways, as wide and as long as there is room."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmops.cli.live.board import Board, GatewayRow, ModelRow, ReplicaRow
from llmops.cli.live.orders import ORDERS, View, down

NONE = "-"
BAD, POOR = "bold red", "yellow"
# from where on it is worth a look, and where somebody is woken (docs/metrics.md); batch is a range
TTFT_S, TPOT_MS, KV_USE, GOODPUT, HIT = (0.5, 1.0), (50.0, 100.0), (0.9, 0.95), (0.9, 0.85), (0.4, 0.3)
STATES = {"ready": "green", "spare": "green", "starting": "cyan", "draining": POOR, "suspect": POOR, "gone": BAD}


@dataclass(frozen=True)
class Column:
    """Of the table of models. `need`: how wide a terminal must be to have it."""

    name: str
    text: Callable[[ModelRow], str | Text]
    need: int = 0
    right: bool = True


def _marked(text: str, value: float | None, limits: tuple[float, float]) -> str | Text:
    """Yellow from the first limit on, red from the second; downwards where the second is the lower one."""
    if value is None:
        return text
    look, wake = limits
    sign = 1 if wake > look else -1
    return Text(text, BAD if sign * value > sign * wake else POOR if sign * value > sign * look else "")


def number(value: float | None) -> str:
    """Three figures at least, and no more than four characters before its unit."""
    if value is None:
        return NONE
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.1f}" if 0 < value < 100 and value != int(value) else f"{value:.0f}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}" if 0.9 <= value < 1 else f"{value:.0%}"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.3g} s"


def size(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _ready(row: ModelRow) -> str | Text:
    if row.ready is None:
        return NONE
    text = f"{row.ready}/{row.replicas}"
    return Text(text, BAD if not row.ready else POOR if row.ready < (row.replicas or 0) else "")


def _waiting(row: ModelRow) -> str:
    """By tier, where there are several."""
    tiers = {tier: count for tier, count in row.waiting.items() if count}
    if set(row.waiting) <= {"default"} or not tiers:
        return number(sum(tiers.values()))
    return ", ".join(f"{tier} {count:.0f}" for tier, count in sorted(tiers.items()))


COLUMNS = (
    Column("MODEL", lambda row: row.model, right=False),
    Column("READY", _ready),
    Column("REQ/S", lambda row: number(row.requests_per_s)),
    Column("RUN", lambda row: number(row.running)),
    Column("WAIT", _waiting),
    Column("TTFT p50", lambda row: _marked(seconds(row.ttft_p50_s), row.ttft_p50_s, TTFT_S), need=110),
    Column("p95", lambda row: _marked(seconds(row.ttft_p95_s), row.ttft_p95_s, TTFT_S)),
    Column("TPOT p50", lambda row: _marked(_ms(row.tpot_p50_ms), row.tpot_p50_ms, TPOT_MS), need=110),
    Column("p95", lambda row: _marked(_ms(row.tpot_p95_ms), row.tpot_p95_ms, TPOT_MS)),
    Column("GOOD", lambda row: _marked(share(row.goodput), row.goodput, GOODPUT)),
    Column("IN/S", lambda row: number(row.tokens_in_per_s), need=95),
    Column("OUT/S", lambda row: number(row.tokens_out_per_s)),
    Column("HIT", lambda row: _marked(share(row.prefix_hit_rate), row.prefix_hit_rate, HIT), need=95),
    Column("KV", lambda row: _marked(share(row.kv_use), row.kv_use, KV_USE)),
    Column("BATCH", lambda row: number(row.batch), need=125),
    Column("FAIL/S", lambda row: _trouble(row.failed_per_s), need=125),
    Column("SHED/S", lambda row: _trouble(row.shed_per_s), need=125),
    Column("LEFT/S", lambda row: number(row.aborted_per_s), need=125),
)


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g} ms"


def _trouble(rate: float | None) -> str | Text:
    return Text(number(rate), BAD if rate else "")


def screen(board: Board, view: View, width: int, height: int | None = None, keys: str = "") -> RenderableType:
    """`height` in lines, None for as long as it is; `keys`: what can be pressed."""
    models = sorted(board.models, key=lambda row: (ORDERS[view.sort](row), row.model))
    parts: list[RenderableType] = [_heading(board, view, keys), "", _models(models, width)]
    gateways: list[RenderableType] = ["", _gateways(board.gateways)]
    if view.replicas and board.replicas:
        # headings and blank lines of the three tables
        room = None if height is None else height - len(models) - len(board.gateways) - 8
        parts += _replicas(board.replicas, room)
    return Group(*parts, *gateways)


def _heading(board: Board, view: View, keys: str) -> Text:
    away = sum(bool(one.problem) for one in board.gateways)
    count = len(board.gateways)
    said = [
        f"{count} gateway{'s' if count != 1 else ''}" + (f", {away} away" if away else ""),
        f"rates over {board.seconds:.0f} s" if board.seconds else "rates from the second look on",
        f"by {view.sort}",
        *([keys] if keys else []),
    ]
    text = Text.assemble(("llmops top", "bold"), f"  {time.strftime('%H:%M:%S')}  ", "  ·  ".join(said))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _table(names: Sequence[tuple[str, bool]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, right in names:
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    return table


def _models(rows: Sequence[ModelRow], width: int) -> RenderableType:
    if not rows:
        return Text("No model is known yet.")
    columns = [one for one in COLUMNS if width >= one.need]
    table = _table([(one.name, one.right) for one in columns])
    for row in rows:
        table.add_row(*(one.text(row) for one in columns))
    return table


def _replicas(rows: Sequence[ReplicaRow], room: int | None) -> list[RenderableType]:
    """Those in trouble first, then the fullest."""
    rows = sorted(rows, key=lambda row: (row.state in ("ready", ""), not row.doubts, down(row.kv_use), row.replica))
    shown = rows if room is None or len(rows) <= room else rows[: max(room - 1, 0)]
    columns = ("REPLICA", "MODEL", "STATE", "HEARD", "RUN", "WAIT", "KV", "STEP", "PREFILL/S")
    table = _table([(name, at > 2) for at, name in enumerate(columns)])
    for row in shown:
        table.add_row(
            row.replica,
            row.model,
            _state(row),
            seconds(row.heard_seconds_ago),
            number(row.running),
            number(row.waiting),
            _marked(share(row.kv_use), row.kv_use, KV_USE),
            _ms(row.step_ms),
            number(row.prefill_tokens_per_s),
        )
    more = len(rows) - len(shown)
    return ["", *([table] if shown else []), *([Text(f"… and {more} more replicas", "dim")] if more else [])]


def _state(row: ReplicaRow) -> Text:
    doubts = f" ({row.doubts} see it otherwise)" if row.doubts else ""
    return Text((row.problem or row.state or NONE) + doubts, BAD if row.problem else STATES.get(row.state, ""))


def _gateways(rows: Sequence[GatewayRow]) -> RenderableType:
    names = [("GATEWAY", False), ("REQ/S", True), ("STREAMS", True), ("LOOP HELD", True), ("MEMORY", True)]
    table = _table([*names, ("REFUSED/S", False)])
    for row in rows:
        if row.problem:
            continue
        refused = "  ".join(f"{status}: {number(rate)}" for status, rate in row.refused_per_s.items())
        table.add_row(
            row.url,
            number(row.requests_per_s),
            number(row.streams),
            NONE if row.loop_held is None else f"{row.loop_held:.1%}",
            size(row.memory_bytes),
            refused or NONE,
        )
    lines = [Text(f"{row.url}  {row.problem}", BAD) for row in rows if row.problem]
    return Group(*([table] if table.row_count else []), *lines)
