"""The columns of the tables of `llmops top`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.table import Table
from rich.text import Text

from llmops.cli.monitor.exposition import MAX_LABEL_LENGTH
from llmops.cli.monitor.snapshot import GatewayRow, ModelRow, ReplicaRow
from llmops.untrusted_text import escape_unsafe

MISSING_VALUE = "-"
BAD, POOR = "bold red", "yellow"
# values from which on a cell is yellow and red. Alerts fire at the red values (docs/metrics.md).
TTFT_S, TPOT_MS, KV_USE, GOODPUT, HIT = (0.5, 1.0), (50.0, 100.0), (0.9, 0.95), (0.9, 0.85), (0.4, 0.3)
STATES = {"ready": "green", "starting": "cyan", "draining": POOR, "suspect": POOR, "gone": BAD}
GAP = 2

R = TypeVar("R")


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of a table.

    A narrow terminal leaves out the columns with the highest `dropped` first. A column with 0
    always stays.
    """

    name: str
    text: Callable[[R], str | Text]
    dropped: int = 0
    right: bool = True


def table(columns: Sequence[Column[R]], rows: Sequence[R], width: int) -> Table:
    """Return a table with as many of the columns as fit into `width` characters."""
    cells = {one: [_text(one.text(row)) for row in rows] for one in columns}
    widths = {one: max(map(len, (one.name, *map(str, cells[one])))) for one in columns}
    kept = list(columns)
    while sum(widths[one] + GAP for one in kept) - GAP > width and any(one.dropped for one in kept):
        kept.remove(max(kept, key=lambda one: one.dropped))
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for one in kept:
        made.add_column(one.name, justify="right" if one.right else "left", no_wrap=True)
    for row in zip(*(cells[one] for one in kept), strict=True):
        made.add_row(*row)
    return made


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(escape_unsafe(cell, MAX_LABEL_LENGTH))


def number(value: float | None) -> str:
    """Format a number with three significant digits, and at most four characters before its unit."""
    if value is None:
        return MISSING_VALUE
    for size_, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size_:
            return f"{value / (1e3 if unit == 'k' else size_):.3g}{unit}"
    return f"{value:.1f}" if 0 < value < 100 and value != int(value) else f"{value:.0f}"


def share(value: float | None) -> str:
    return MISSING_VALUE if value is None else f"{value:.1%}" if 0.9 <= value < 1 else f"{value:.0%}"


def seconds(value: float | None) -> str:
    if value is None:
        return MISSING_VALUE
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.3g} s"


def milliseconds(value: float | None) -> str:
    return MISSING_VALUE if value is None else f"{value:.3g} ms"


def size(value: float | None) -> str:
    if value is None:
        return MISSING_VALUE
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _highlight(text: str, value: float | None, limits: tuple[float, float]) -> Text:
    """Return `text`, in yellow if `value` exceeds the first limit, in red if the second.

    If the second limit is the smaller one, values below the limits are coloured instead.
    """
    if value is None:
        return Text(text)
    look, wake = limits
    sign = 1 if wake > look else -1
    return Text(text, BAD if sign * value > sign * wake else POOR if sign * value > sign * look else "")


def _ready(row: ModelRow) -> Text:
    if row.ready is None:
        return Text(MISSING_VALUE)
    return Text(
        f"{row.ready}/{row.replicas}", BAD if not row.ready else POOR if row.ready < (row.replicas or 0) else ""
    )


def _waiting(row: ModelRow) -> str:
    """Return the number of waiting requests, by tier if there are several."""
    tiers = {tier: count for tier, count in row.waiting.items() if count}
    if set(row.waiting) <= {"default"} or not tiers:
        return number(sum(tiers.values()))
    return ", ".join(f"{tier} {count:.0f}" for tier, count in sorted(tiers.items()))


def _trouble(rate: float | None) -> Text:
    return Text(number(rate), BAD if rate else "")


def _state(row: ReplicaRow) -> Text:
    doubts = f" ({row.doubts} see it otherwise)" if row.doubts else ""
    return Text((row.problem or row.state or MISSING_VALUE) + doubts, BAD if row.problem else STATES.get(row.state, ""))


def _held(row: GatewayRow) -> str:
    return MISSING_VALUE if row.loop_held is None else f"{row.loop_held:.1%}"


def _refused(row: GatewayRow) -> str:
    return "  ".join(f"{status}: {number(rate)}" for status, rate in row.refused_per_s.items()) or MISSING_VALUE


MODELS: tuple[Column[ModelRow], ...] = (
    Column("MODEL", lambda row: row.model, right=False),
    Column("READY", _ready),
    Column("REQ/S", lambda row: number(row.requests_per_s)),
    Column("RUN", lambda row: number(row.running)),
    Column("WAIT", _waiting),
    Column("TTFT p50", lambda row: _highlight(seconds(row.ttft_p50_s), row.ttft_p50_s, TTFT_S), 6),
    Column("TTFT p95", lambda row: _highlight(seconds(row.ttft_p95_s), row.ttft_p95_s, TTFT_S)),
    Column("TPOT p50", lambda row: _highlight(milliseconds(row.tpot_p50_ms), row.tpot_p50_ms, TPOT_MS), 7),
    Column("TPOT p95", lambda row: _highlight(milliseconds(row.tpot_p95_ms), row.tpot_p95_ms, TPOT_MS), 1),
    Column("GOOD", lambda row: _highlight(share(row.goodput), row.goodput, GOODPUT)),
    Column("IN/S", lambda row: number(row.tokens_in_per_s), 5),
    Column("OUT/S", lambda row: number(row.tokens_out_per_s), 3),
    Column("HIT", lambda row: _highlight(share(row.prefix_hit_rate), row.prefix_hit_rate, HIT), 4),
    Column("KV", lambda row: _highlight(share(row.kv_use), row.kv_use, KV_USE)),
    Column("BATCH", lambda row: number(row.batch), 8),
    Column("FAIL/S", lambda row: _trouble(row.failed_per_s), 2),
    Column("SHED/S", lambda row: _trouble(row.shed_per_s), 9),
    Column("LEFT/S", lambda row: number(row.aborted_per_s), 10),
)

REPLICAS: tuple[Column[ReplicaRow], ...] = (
    Column("REPLICA", lambda row: row.replica, right=False),
    Column("MODEL", lambda row: row.model, right=False),
    Column("STATE", _state, right=False),
    Column("SOURCE", lambda row: row.source or "-", 5, right=False),
    Column("HEARD", lambda row: seconds(row.last_update_seconds_ago), 2),
    Column("RUN", lambda row: number(row.running)),
    Column("WAIT", lambda row: number(row.waiting)),
    Column("OWN", lambda row: number(row.own), 4),
    Column("KV", lambda row: _highlight(share(row.kv_use), row.kv_use, KV_USE)),
    Column("STEP", lambda row: milliseconds(row.step_ms), 1),
    Column("PREFILL/S", lambda row: number(row.prefill_tokens_per_s), 3),
)

GATEWAYS: tuple[Column[GatewayRow], ...] = (
    Column("GATEWAY", lambda row: row.url, right=False),
    Column("REQ/S", lambda row: number(row.requests_per_s)),
    Column("STREAMS", lambda row: number(row.streams), 1),
    Column("LOOP HELD", _held, 2),
    Column("MEMORY", lambda row: size(row.memory_bytes), 3),
    Column("REFUSED/S", _refused, right=False),
)
