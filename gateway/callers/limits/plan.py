"""What quotas ask of each request of their callers, worked out once for all of them; and what one request has of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmops.gateway.callers.limits.base import Limiter
from llmops.gateway.callers.limits.buckets import PLACES, RATE, Want
from llmops.gateway.callers.limits.headers import Level
from llmops.gateway.messages import Quota

_MOST = 10_000


@dataclass(slots=True)
class Part:
    """One want of a request. `taken`: what it has reserved so far, by `by`; None before."""

    quota: Quota
    of: str
    want: Want
    taken: int = 0
    by: Limiter | None = None
    left: float = 0.0

    @property
    def level(self) -> Level:
        return Level(self.of, self.want.limit, self.left)


class Asked:
    """Of each request with some quotas: requests and places (`entry`), tokens (`rates`), and money (`budgets`)."""

    __slots__ = ("_entry", "budgets", "rates", "smallest")

    def __init__(self, entry: Iterable[Quota], all_: Sequence[Quota]) -> None:
        self._entry = [want for quota in entry for want in _entry(quota)]
        self.rates = [(quota, f"{_key(quota)}:tpm", quota.tpm) for quota in all_ if quota.tpm is not None]
        self.smallest = min((quota for quota, _, _ in self.rates), key=lambda quota: quota.tpm or 0, default=None)
        self.budgets = [quota for quota in all_ if quota.budget is not None]

    def entry(self) -> list[Part]:
        return [Part(quota, of, want) for quota, of, want in self._entry]

    def tokens(self, amount: int) -> list[Part]:
        return [Part(quota, "tokens", Want(RATE, key, limit, amount)) for quota, key, limit in self.rates]


class Plan:
    """Of callers with one set of quotas, of which there is at least one."""

    __slots__ = ("_models", "_others", "_quotas", "before", "whose")

    def __init__(self, quotas: Sequence[Quota]) -> None:
        self.whose = quotas[0].of
        self._quotas = quotas
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

    def wait(self, parts: Sequence[Part]) -> bool:
        """Whether all of them may ask later; then they count here until `done`."""
        for part in parts:
            _, key, limit, _, _ = part.want
            left = self._left.get(key, 0.0) - self._waiting.get(key, 0)
            if left <= limit / 2:
                return False
            part.left = left - 1
        for part in parts:
            key = part.want.key
            self._waiting[key] = self._waiting.get(key, 0) + 1
        return True

    def done(self, parts: Sequence[Part]) -> None:
        for part in parts:
            key = part.want.key
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]


def _entry(quota: Quota) -> list[tuple[Quota, str, Want]]:
    asked = []
    if quota.rpm is not None:
        asked.append((quota, "requests", Want(RATE, f"{_key(quota)}:rpm", quota.rpm, 1)))
    if quota.concurrent is not None:
        asked.append((quota, "places", Want(PLACES, _key(quota), quota.concurrent, 1)))
    return asked


def _key(quota: Quota) -> str:
    return f"{quota.of}:{quota.model or ''}"
