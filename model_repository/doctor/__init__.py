"""`llmops doctor`: the abilities of a machine or an image, each as a check with its fix.

`machine` checks what `serve` needs here. `image` compares a container with its row of facts. `deep`
imports, parses and starts everything that works without a GPU, and is the last step of `docker
build`.
"""

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "not ok", "note"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    A `note` does not change the exit code: it says something that a machine like this one can do
    without. `fix` is empty if all is well.
    """

    name: str
    status: CheckStatus
    detail: str
    fix: str = ""


def healthy(checks: list[CheckResult]) -> bool:
    """Return True if no check is `not ok`."""
    return all(check.status != "not ok" for check in checks)
