"""In which order `llmops top` has models, and what of it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmops.cli.live.board import ModelRow


def down(value: float | None) -> float:
    """A key that puts the largest first, and what nobody knows last."""
    return float("inf") if value is None else -value


# what is most worth a look comes first
ORDERS: Mapping[str, Callable[[ModelRow], float]] = {
    "requests": lambda row: down(row.requests_per_s),
    "waiting": lambda row: -sum(row.waiting.values()),
    "ttft": lambda row: down(row.ttft_p95_s),
    "tpot": lambda row: down(row.tpot_p95_ms),
    "goodput": lambda row: float("inf") if row.goodput is None else row.goodput,
    "tokens": lambda row: down(row.tokens_out_per_s),
    "kv": lambda row: down(row.kv_use),
    "failed": lambda row: down(row.failed_per_s),
    "name": lambda row: 0.0,
}


@dataclass(frozen=True)
class View:
    """What the one who looks has chosen."""

    sort: str = "requests"
    replicas: bool = True

    def next_order(self) -> View:
        names = list(ORDERS)
        return replace(self, sort=names[(names.index(self.sort) + 1) % len(names)])

    def with_or_without_replicas(self) -> View:
        return replace(self, replicas=not self.replicas)
