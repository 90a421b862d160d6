"""Findings of checks, and the lists in which checks are registered."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

# `refused`: the model announced that it does not support the feature. `unseen`: this deployment
# could not have shown a fault.
Verdict = Literal["works", "refused", "unseen", "wrong"]
PARTS = ("contract", "answers", "capacity", "speed", "gateway")


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    `detail` is a clause. For the verdict `wrong`, the clause names the fault.
    """

    verdict: Verdict
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def works(detail: str = "", **figures: float) -> Finding:
    return Finding("works", detail, figures)


def refused(detail: str = "") -> Finding:
    return Finding("refused", detail)


def unseen(why: str) -> Finding:
    return Finding("unseen", why)


def wrong(sentence: str, **figures: float) -> Finding:
    return Finding("wrong", sentence, figures)


class WrongError(Exception):
    """A fault that a check found. The message becomes the detail of a `wrong` finding."""


def expect(condition: object, sentence: str) -> None:
    """Raise WrongError with `sentence` if `condition` is false."""
    if not condition:
        raise WrongError(sentence)


class UnseenError(Exception):
    """The reason why a check cannot show a fault on this deployment."""


def assume(condition: object, why: str) -> None:
    """Raise UnseenError with `why` if `condition` is false, and so no fault could show."""
    if not condition:
        raise UnseenError(why)


Subject = TypeVar("Subject")


@dataclass(frozen=True)
class VerifyCheck:
    """A named check.

    The function raises WrongError for a fault, and UnseenError if no fault could show.
    """

    name: str
    function: Callable[[Any], Awaitable[Finding]]

    async def run(self, subject: Any) -> Finding:
        """Return the finding of the check.

        Args:
            subject: The context of the check's part, an EngineContext or an ApiContext.

        Raises:
            WrongError: The check found a fault.
        """
        try:
            return await self.function(subject)
        except UnseenError as error:
            return unseen(str(error))


def check(
    checks: list[VerifyCheck], name: str
) -> Callable[[Callable[[Subject], Awaitable[Finding]]], Callable[[Subject], Awaitable[Finding]]]:
    """Return a decorator that adds a function to `checks` under `name`."""

    def add(function: Callable[[Subject], Awaitable[Finding]]) -> Callable[[Subject], Awaitable[Finding]]:
        checks.append(VerifyCheck(name, function))
        return function

    return add


@dataclass(frozen=True)
class CheckOutcome:
    """The finding of a check that has run.

    Attributes:
        part: The part of the verification, one of PARTS.
        name: The name of the check.
        finding: The result.
        seconds: The duration of the check.
    """

    part: str
    name: str
    finding: Finding
    seconds: float = 0.0

    @property
    def fault(self) -> str | None:
        """Return a clause with part, check and fault, or None without a fault."""
        return f"{self.part}, {self.name}: {self.finding.detail}" if self.finding.verdict == "wrong" else None
