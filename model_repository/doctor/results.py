"""The result of one check, and the verdict over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "not ok", "note"]


@dataclass(frozen=True)
class CheckResult:
    """`note`: not needed on a machine like this one, no effect on the exit code. `fix` is empty when all is well."""

    name: str
    status: CheckStatus
    detail: str
    fix: str = ""


def healthy(checks: list[CheckResult]) -> bool:
    """Return True if nothing is `not ok`."""
    return all(check.status != "not ok" for check in checks)
