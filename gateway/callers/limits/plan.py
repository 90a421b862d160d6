"""What quotas ask of each request of their callers, worked out once for all of them; and what one request has of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llmops.gateway.callers.limits.base import Limiter, Reserved
from llmops.gateway.callers.limits.buckets import PLACES, RATE, Want
from llmops.gateway.callers.limits.headers import Level, level_of
from llmops.gateway.messages import Quota

_MOST = 10_000


class Term(NamedTuple):
    """One thing that a quota bounds. `of`: requests, places, tokens or money. `key`, where limiters keep it, is
    another in each period of a budget, and empty here."""

    quota: Quota
    of: str
    key: str
    limit: int


class Taken:
    """What a request has reserved of `terms`; or, with `taken` empty, what it was refused."""

    __slots__ = ("reserved", "taken", "terms")

    def __init__(self, terms: Sequence[Term], reserved: Reserved) -> None:
        self.terms, self.reserved = terms, reserved
        self.taken = [*reserved.decision.given]

    def __iter__(self) -> Iterator[tuple[Term, Want, int]]:
        return zip(self.terms, self.reserved.wants, self.taken, strict=False)

    @property
    def by(self) -> Limiter:
        return self.reserved.by

    def levels(self) -> Iterator[Level]:
        """Of its rates. A limit may be a share."""
        for term, want, left in zip(self.terms, self.reserved.wants, self.reserved.decision.left, strict=True):
            if want.kind == RATE:
                yield level_of((term.of, want.limit, left))


class Asked:
    """Of each request with some quotas: requests and places (`entry`, with the `wants` for them), tokens (`rates`), and
    money (`budgets`)."""

    __slots__ = ("budgets", "entry", "rates", "smallest", "wants")

    def __init__(self, entry: Iterable[Quota], all_: Sequence[Quota]) -> None:
        found = [one for quota in entry for one in _entry(quota)]
        self.entry, self.wants = [term for term, _ in found], [want for _, want in found]
        self.rates = [Term(quota, "tokens", f"{_key(quota)}:tpm", quota.tpm) for quota in all_ if quota.tpm is not None]
        self.smallest = min((term.quota for term in self.rates), key=lambda quota: quota.tpm or 0, default=None)
        self.budgets = [Term(quota, "money", "", quota.budget.micros) for quota in all_ if quota.budget is not None]


class Plan:
    """Of callers with one set of quotas, of which there is at least one."""

    __slots__ = ("_models", "_others", "_quotas", "before", "holds", "whose")

    def __init__(self, quotas: Sequence[Quota]) -> None:
        self.whose = quotas[0].of
        self._quotas = quotas
        # whether requests have something that is given back
        self.holds = any(quota.concurrent is not None or quota.budget is not None for quota in quotas)
        # of whatever model: what is asked before anything is read
        plain = [quota for quota in quotas if quota.model is None]
        self.before = Asked(plain, plain)
        self._models = {quota.model: self._of(quota.model) for quota in quotas if quota.model is not None}
        self._others = self._of(None)

    def of(self, model: str) -> Asked:
        """Once the model is known: its own requests and places, and all tokens and money."""
        return self._models.get(model, self._others)

    def _of(self, model: str | None) -> Asked:
        bound = [quota for quota in self._quotas if quota.model in (None, model)]
        return Asked([quota for quota in bound if quota.model is not None], bound)


class Guesses:
    """What this process last saw of requests and places. Where there was much, a request asks for its own together with
    its tokens: one step and not two. How much there is, that step decides."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}
        self._waiting: dict[str, int] = {}

    def note(self, want: Want, left: float) -> None:
        if len(self._left) > _MOST:
            self._left.clear()
        self._left[want.key] = left

    def wait(self, wants: Sequence[Want]) -> bool:
        """Whether all of them may be asked for later; then they count here until `done`."""
        left, waiting = self._left, self._waiting
        for _, key, limit, _, _ in wants:
            if left.get(key, 0.0) - waiting.get(key, 0) <= limit / 2:
                return False
        for want in wants:
            waiting[want.key] = waiting.get(want.key, 0) + 1
        return True

    def done(self, wants: Sequence[Want]) -> None:
        waiting = self._waiting
        for _, key, _, _, _ in wants:
            waiting[key] -= 1
            if not waiting[key]:
                del waiting[key]


def _entry(quota: Quota) -> Iterator[tuple[Term, Want]]:
    key = _key(quota)
    if quota.rpm is not None:
        yield Term(quota, "requests", f"{key}:rpm", quota.rpm), Want(RATE, f"{key}:rpm", quota.rpm, 1)
    if quota.concurrent is not None:
        yield Term(quota, "places", key, quota.concurrent), Want(PLACES, key, quota.concurrent, 1)


def _key(quota: Quota) -> str:
    return f"{quota.of}:{quota.model or ''}"
