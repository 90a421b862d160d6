"""What a check finds, and how checks are listed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

# refused: the model announced that it cannot; unseen: nothing here could have shown a fault
Verdict = Literal["works", "refused", "unseen", "wrong"]
PARTS = ("contract", "answers", "capacity", "speed", "gateway")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `detail` is a sentence: for `wrong`, the fault and what to do about it."""

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
    """Raised from within a check: the sentence of a `wrong` finding."""


def expect(condition: object, sentence: str) -> None:
    """Raises WrongError unless `condition` holds."""
    if not condition:
        raise WrongError(sentence)


Subject = TypeVar("Subject")


@dataclass(frozen=True)
class VerifyCheck:
    """`run` takes the part's subject (Desk, Surface) and answers with a Finding or raises WrongError."""

    name: str
    run: Callable[[Any], Awaitable[Finding]]


def check(
    checks: list[VerifyCheck], name: str
) -> Callable[[Callable[[Subject], Awaitable[Finding]]], Callable[[Subject], Awaitable[Finding]]]:
    """Adds the function to `checks`."""

    def add(function: Callable[[Subject], Awaitable[Finding]]) -> Callable[[Subject], Awaitable[Finding]]:
        checks.append(VerifyCheck(name, function))
        return function

    return add


@dataclass(frozen=True)
class CheckOutcome:
    """A finding with its place in the report; `seconds` is what it took."""

    part: str
    name: str
    finding: Finding
    seconds: float = 0.0

    @property
    def fault(self) -> str | None:
        """The sentence for a reader, None when nothing is wrong."""
        return f"{self.part}, {self.name}: {self.finding.detail}" if self.finding.verdict == "wrong" else None
