"""In which order `llmops top` has models, and what of it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmops.cli.monitor.snapshot import ModelRow


def descending(value: float | None) -> float:
    """A key that puts the largest first, and what nobody knows last."""
    return float("inf") if value is None else -value


# what is most worth a look comes first
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
    """What the one who looks has chosen."""

    sort: str = "requests"
    replicas: bool = True

    def cycle_sort_order(self) -> ViewOptions:
        names = list(SORT_ORDERS)
        return replace(self, sort=names[(names.index(self.sort) + 1) % len(names)])

    def toggle_replicas(self) -> ViewOptions:
        return replace(self, replicas=not self.replicas)
