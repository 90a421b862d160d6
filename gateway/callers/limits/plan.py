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


class Asked:
    """Of each request with some quotas: requests and places (with the `wants` for them, and their `keys`), tokens
    (`rates`), and money (`budgets`); `terms` are all of them, in this order. `rated`: where in it the rates of requests
    are, and those of tokens, as far as there are any."""

    __slots__ = ("budgets", "keys", "rated", "rates", "smallest", "terms", "wants")

    def __init__(self, entry: Iterable[Quota], all_: Sequence[Quota]) -> None:
        found = [one for quota in entry for one in _entry(quota)]
        self.wants = [want for _, want in found]
        self.keys = [want.key for want in self.wants]
        self.rates = [Term(quota, "tokens", f"{_key(quota)}:tpm", quota.tpm) for quota in all_ if quota.tpm is not None]
        self.smallest = min((term.quota for term in self.rates), key=lambda quota: quota.tpm or 0, default=None)
        self.budgets = [Term(quota, "money", "", quota.budget.micros) for quota in all_ if quota.budget is not None]
        self.terms = [*(term for term, _ in found), *self.rates, *self.budgets]
        where = {of: [at for at, term in enumerate(self.terms) if term.of == of] for of in ("requests", "tokens")}
        self.rated = [(of, rates) for of, rates in where.items() if rates]


class Taken:
    """What a request has reserved of what it `asked`; or, with `taken` empty, what it was refused."""

    __slots__ = ("asked", "reserved", "taken")

    def __init__(self, asked: Asked, reserved: Reserved) -> None:
        self.asked, self.reserved = asked, reserved
        self.taken = [*reserved.decision.given]

    def __iter__(self) -> Iterator[tuple[Term, Want, int]]:
        return zip(self.asked.terms, self.reserved.wants, self.taken, strict=False)

    @property
    def by(self) -> Limiter:
        return self.reserved.by

    def levels(self) -> list[Level]:
        """Of requests and of tokens, as asked for, that of which the least is left. A limit may be a share."""
        wants, left = self.reserved.wants, self.reserved.decision.left
        levels = []
        for of, rates in self.asked.rated:
            if rates[-1] < len(left):
                at = min(rates, key=left.__getitem__)
                levels.append(level_of((of, wants[at].limit, left[at])))
        return levels


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

    def of(self, model: str, whole: bool) -> Asked:
        """Once the model is known: its own requests and places, and all tokens and money; `whole`: with `before`."""
        return self._models.get(model, self._others)[whole]

    def _of(self, model: str | None) -> tuple[Asked, Asked]:
        bound = [quota for quota in self._quotas if quota.model in (None, model)]
        own = [quota for quota in bound if quota.model is not None]
        return Asked(own, bound), Asked([*(quota for quota in bound if quota.model is None), *own], bound)


class Guesses:
    """What this process last saw of requests and places. Where there was much, a request asks for its own together with
    its tokens: one step and not two. How much there is, that step decides."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}
        # requests that wait to ask, whosever they are
        self._waiting = 0

    def note(self, keys: Sequence[str], left: Sequence[float]) -> None:
        """What is left of each; of what comes behind the last key nothing is noted."""
        if len(self._left) > _MOST:
            self._left.clear()
        self._left.update(zip(keys, left, strict=False))

    def wait(self, wants: Sequence[Want]) -> bool:
        """Whether all of them may be asked for later; then they count here until `done`."""
        for _, key, limit, _, _ in wants:
            if self._left.get(key, 0.0) - self._waiting <= limit / 2:
                return False
        self._waiting += 1
        return True

    def done(self) -> None:
        self._waiting -= 1


def _entry(quota: Quota) -> Iterator[tuple[Term, Want]]:
    key = _key(quota)
    if quota.rpm is not None:
        yield Term(quota, "requests", f"{key}:rpm", quota.rpm), Want(RATE, f"{key}:rpm", quota.rpm, 1)
    if quota.concurrent is not None:
        yield Term(quota, "places", key, quota.concurrent), Want(PLACES, key, quota.concurrent, 1)


def _key(quota: Quota) -> str:
    return f"{quota.of}:{quota.model or ''}"
