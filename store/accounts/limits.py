"""The limits and budgets of keys and tenants."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from llmops.clocks import period_start
from llmops.errors import InputError

if TYPE_CHECKING:
    from sqlalchemy import RowMapping

MAX_LIMIT = 1_000_000_000
MAX_BUDGET_MICROS = 10**15
PERIODS = ("day", "week", "month")
_TO_STOP = "to stop a key, revoke it; to stop a tenant, delete it"


@dataclass(frozen=True)
class Budget:
    """A budget in micro-dollars per day, week (from Monday) or month, in UTC."""

    micros: int
    period: str

    def __post_init__(self) -> None:
        if self.period not in PERIODS:
            raise InputError(f"A budget cannot be per {self.period}; write one of {', '.join(PERIODS)}.")
        if not (isinstance(self.micros, int) and 0 < self.micros <= MAX_BUDGET_MICROS):
            raise InputError(f"A budget is more than $0 and at most ${MAX_BUDGET_MICROS // 10**6:,}; {_TO_STOP}.")

    def begins(self, now: datetime) -> datetime:
        """Return the start of the period that contains `now`."""
        return period_start(now, self.period)


@dataclass(frozen=True)
class Limits:
    """The limits of a key or tenant. None means unlimited.

    The limits are requests and tokens per minute, concurrent requests, and a budget.
    """

    rpm: int | None = None
    tpm: int | None = None
    concurrent: int | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        for name in ("rpm", "tpm", "concurrent"):
            limit = getattr(self, name)
            # SQLite stores values of any type
            if limit is not None and not (isinstance(limit, int) and 0 < limit <= MAX_LIMIT):
                raise InputError(f"{name} cannot be {limit}: a limit is 1 to {MAX_LIMIT:,}; {_TO_STOP}.")

    def columns(self) -> dict[str, Any]:
        """Return the limits as values for the columns of `tenants` and `api_keys`."""
        return {
            "rpm": self.rpm,
            "tpm": self.tpm,
            "concurrent": self.concurrent,
            "budget_micros": self.budget.micros if self.budget else None,
            "budget_period": self.budget.period if self.budget else None,
        }

    @classmethod
    def from_row(cls, row: RowMapping, prefix: str = "") -> Limits:
        """Return the limits in a row. `prefix` is the beginning of the names of their columns."""
        micros, period = row[f"{prefix}budget_micros"], row[f"{prefix}budget_period"]
        return cls(
            rpm=row[f"{prefix}rpm"],
            tpm=row[f"{prefix}tpm"],
            concurrent=row[f"{prefix}concurrent"],
            budget=None if micros is None else Budget(micros, period),
        )

    def data(self) -> dict[str, Any]:
        return asdict(self)
