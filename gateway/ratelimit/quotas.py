"""What quotas ask of each request of their callers, worked out once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from llmops.gateway.interfaces import Quota
from llmops.gateway.ratelimit.buckets import UNLIMITED, Limit, LimitRequest, Remaining, make_limit_request

# what is asked before anything is read
ENTRY_REQUEST = LimitRequest(requests=1, places=1)


class ModelLimits:
    """What bounds requests for one model: first the `plain` ones, of whatever model, then the
    model's own (`all`; of each its quota is in `quotas`). `tokens` are those of the `smallest`
    bucket. `more`: something is asked only once the model is known.
    """

    __slots__ = ("all", "more", "own", "plain", "quotas", "smallest", "tokens")

    def __init__(self, plain: Sequence[tuple[Quota, Limit]], own: Sequence[tuple[Quota, Limit]]) -> None:
        self.quotas = [quota for quota, _ in (*plain, *own)]
        self.plain, self.own = [bound for _, bound in plain], [bound for _, bound in own]
        self.all = [*self.plain, *self.own]
        self.smallest = min(self.quotas, key=lambda quota: quota.tpm or UNLIMITED, default=None)
        self.tokens = min((bound.tokens for bound in self.all), default=UNLIMITED)
        self.more = bool(own) or any(quota.tpm is not None or quota.budget is not None for quota in self.quotas)

    def asks(self, tokens: int, money: int, least: int, entered: bool) -> Sequence[LimitRequest]:
        """Of each; `entered`: the plain ones were asked for their part before."""
        whole = make_limit_request((1, tokens, 1, money, least))
        if not entered:
            return (whole,) * len(self.all)
        return (make_limit_request((0, tokens, 0, money, least)),) * len(self.plain) + (whole,) * len(self.own)


class CallerLimits:
    """Of callers with one set of quotas, of which there is at least one.

    `room`: what this process last saw of requests and places beyond half of each. Where there is
    some, a request asks for its own together with its tokens: one step and not two. How much there
    is, that step decides.

    `fresh`: until when (the clock's time) the periods of its `budgets` are known, `generation`: of
    the limiter, then.
    """

    __slots__ = ("_halves", "_models", "before", "budgets", "fresh", "generation", "holds", "room", "whose")

    def __init__(self, quotas: Sequence[Quota]) -> None:
        known = [(quota, _limit_of_quota(quota)) for quota in quotas]
        plain = [(quota, bound) for quota, bound in known if quota.model is None]
        self.whose = quotas[0].of
        # whether requests have something that is given back
        self.holds = any(bound.holds for _, bound in known)
        self.budgets = [(quota, bound) for quota, bound in known if quota.budget is not None]
        self.before = ModelLimits(plain, ())
        models = {quota.model for quota in quotas} - {None}
        self._models = {model: ModelLimits(plain, [one for one in known if one[0].model == model]) for model in models}
        self._halves = [(one.requests / 2, one.places / 2) for one in self.before.plain]
        # of what is limited nothing is known yet
        self.room = 0.0 if any(min(one.requests, one.places) < UNLIMITED for one in self.before.plain) else UNLIMITED
        self.fresh, self.generation = -inf, 0

    def of(self, model: str) -> ModelLimits:
        return self._models.get(model, self.before)

    def note(self, left: Sequence[Remaining]) -> None:
        """`left`: of the plain bounds, and perhaps of others behind them."""
        room = UNLIMITED
        for at, (half, half_places) in enumerate(self._halves):
            requests, _, places, _ = left[at]
            if requests - half < room:
                room = requests - half
            if places - half_places < room:
                room = places - half_places
        self.room = room


def _limit_of_quota(quota: Quota) -> Limit:
    """What is spent has a record for each kind of period: it would not be known which of two days
    is the later one.
    """
    budget = quota.budget
    name = f"{quota.of}:{quota.model or ''}:{budget.period if budget else ''}"
    limits = (quota.rpm, quota.tpm, quota.concurrent, budget.micros if budget else None)
    requests, tokens, places, money = (UNLIMITED if limit is None else limit for limit in limits)
    return Limit(name, requests, tokens, places, money)
