"""The checks of `llmops doctor`, each with the fix of its fault.

`machine` checks the requirements of `llmops serve` on this machine. `image` compares a container
with the facts of its image. `deep` imports, parses and starts everything that works without a GPU,
and is the last step of `docker build`.
"""

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "not ok", "note"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    `fix` says how to remove the fault, and is empty without a fault. A `note` reports a missing
    part that this kind of machine does not need, and does not change the exit code.
    """

    name: str
    status: CheckStatus
    detail: str
    fix: str = ""


def healthy(checks: list[CheckResult]) -> bool:
    """Return True if no check is `not ok`."""
    return all(check.status != "not ok" for check in checks)
