"""The limits that apply to each request of a caller, computed once for each set of quotas."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from llmops.gateway.interfaces import Quota
from llmops.gateway.ratelimit.buckets import UNLIMITED, Limit, LimitRequest, Remaining, make_limit_request

#: Amounts reserved before the request's body is read: one request and one slot.
ENTRY_REQUEST = LimitRequest(requests=1, places=1)


class ModelLimits:
    """The limits on requests for one model.

    Attributes:
        plain: The limits on requests for any model.
        own: The limits on requests for this model only.
        all: The limits of `plain`, then the limits of `own`.
        quotas: The quota of each limit in `all`.
        smallest: The quota with the fewest tokens per minute.
        tokens: The size of the smallest token bucket, in tokens.
        more: True if tokens, money or limits of the model must be reserved once the model is known.
        paces: The name of the smallest narrower limit, and its tokens per minute, by the name of a
            limit that further callers share.
    """

    def __init__(self, known: Sequence[tuple[Quota, Limit]]) -> None:
        """Compute the limits from `known`: the quotas that apply, from the narrowest owner on."""
        plain = [pair for pair in known if pair[0].model is None]
        own = [pair for pair in known if pair[0].model is not None]
        self.quotas = [quota for quota, _ in (*plain, *own)]
        self.plain, self.own = [bound for _, bound in plain], [bound for _, bound in own]
        self.all = [*self.plain, *self.own]
        self.smallest = min(self.quotas, key=lambda quota: quota.tpm or UNLIMITED, default=None)
        self.tokens = min((bound.tokens for bound in self.all), default=UNLIMITED)
        self.more = bool(own) or any(quota.tpm is not None or quota.budget is not None for quota in self.quotas)
        self.paces: dict[str, tuple[str, float]] = {}
        owners = [quota.of for quota, _ in known]
        for quota, bound in known:
            narrower = [other for _, other in known[: owners.index(quota.of)]]
            smallest = min(narrower, key=lambda other: other.tokens, default=bound)
            if smallest is not bound and max(smallest.tokens, bound.tokens) < UNLIMITED:
                self.paces[bound.name] = smallest.name, smallest.tokens

    def asks(self, tokens: int, money: int, least: int, entered: bool) -> Sequence[LimitRequest]:
        """Return the amounts that a request asks of each limit in `all`.

        Args:
            tokens: Tokens to reserve.
            money: Micro-dollars that the request can use at most.
            least: Micro-dollars that are enough to start the request.
            entered: True if the request and its slot are already reserved in the limits of `plain`.
        """
        whole = make_limit_request((1, tokens, 1, money, least))
        if not entered:
            return (whole,) * len(self.all)
        return (make_limit_request((0, tokens, 0, money, least)),) * len(self.plain) + (whole,) * len(self.own)


class CallerLimits:
    """The limits of all callers with one set of quotas, which must not be empty.

    Attributes:
        owner: The name under which lengths of answers are remembered; by default the owner of the
            first quota. Callers that share a quota have separate names.
        before: The limits before the model is known.
        budgets: The quotas with a budget, and their limits.
        holds: True if open requests hold slots or money, which they give back.
        room: The value of `RateLimits.waiting` up to which a request may postpone its entry, and
            reserve the entry together with its tokens in one step instead of two. Computed when the
            levels are read: the smallest amount of requests or slots above half of a limit, divided
            by the number of gateways, plus `RateLimits.settled`.
        fresh: The time of the clock until which the periods of `budgets` are valid.
        generation: The limiter's generation when the periods were read.
    """

    def __init__(self, quotas: Sequence[Quota], owner: str = "") -> None:
        """Compute the limits of `quotas`, in order from the narrowest owner to the widest."""
        known = [(quota, _limit_of_quota(quota)) for quota in quotas]
        self.owner = owner or quotas[0].of
        self.holds = any(bound.holds for _, bound in known)
        self.budgets = [(quota, bound) for quota, bound in known if quota.budget is not None]
        self.before = ModelLimits([pair for pair in known if pair[0].model is None])
        self._models = {
            model: ModelLimits([pair for pair in known if pair[0].model in (None, model)])
            for model in {quota.model for quota in quotas} - {None}
        }
        self._halves = [(bound.requests / 2, bound.places / 2) for bound in self.before.plain]
        # The levels are not known yet, so limited quantities start without room.
        self.room = 0.0 if any(min(each.requests, each.places) < UNLIMITED for each in self.before.plain) else UNLIMITED
        self.fresh, self.generation = -inf, 0

    def of(self, model: str) -> ModelLimits:
        """Return the limits on requests for `model`."""
        return self._models.get(model, self.before)

    def note(self, left: Sequence[Remaining], gateways: float, settled: int) -> None:
        """Update `room` from the amounts left in the limits of `plain`.

        Args:
            left: The amounts left in each limit of `plain`. Amounts of other limits may follow.
            gateways: The number of processes that share the limits.
            settled: The value of `RateLimits.settled` before the amounts were read.
        """
        room = UNLIMITED
        for at, (half, half_places) in enumerate(self._halves):
            requests, _, places, _ = left[at]
            if requests - half < room:
                room = requests - half
            if places - half_places < room:
                room = places - half_places
        self.room = room / gateways + settled


def _limit_of_quota(quota: Quota) -> Limit:
    """Return the limit of a quota.

    Each kind of budget period has its own record, because the first days of a daily and of a
    monthly period cannot be compared.
    """
    budget = quota.budget
    name = f"{quota.of}:{quota.model or ''}:{budget.period if budget else ''}"
    limits = (quota.rpm, quota.tpm, quota.concurrent, budget.micros if budget else None)
    requests, tokens, places, money = (UNLIMITED if limit is None else limit for limit in limits)
    return Limit(name, requests, tokens, places, money)
