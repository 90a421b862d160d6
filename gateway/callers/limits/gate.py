"""What a request meets: its quotas become reservations, and its end makes them what it really used."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from time import monotonic

from llmops.gateway.callers.limits.base import Limiter
from llmops.gateway.callers.limits.buckets import MONEY, PLACES, RATE, Change, Want
from llmops.gateway.callers.limits.budgets import Budgets, Costs
from llmops.gateway.callers.limits.expected import Expected
from llmops.gateway.callers.limits.headers import anthropic_headers, openai_headers
from llmops.gateway.callers.limits.plan import Guesses, Part, Plan
from llmops.gateway.callers.limits.refusals import refusal, too_large
from llmops.gateway.callers.limits.refused import Refused
from llmops.gateway.messages import Grant, Outcome, Quota, Usage

# Seconds between two looks at answers that grow, and between two signs of life.
TICK = 0.5
# Seconds for which a caller with too many open requests is not counted again: one of them may end at any time.
BUSY = 0.1
# what an answer that nothing cut short ends with
_OWN_ENDS = frozenset({"stop", "tool_calls"})
_ENTRY = frozenset({"requests", "places"})


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


class Gate:
    """All limits of this process."""

    def __init__(
        self,
        limiter: Limiter,
        costs: Costs | None = None,
        clock: Callable[[], float] = monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Without `costs` budgets bound nothing."""
        self.limiter, self.clock, self.now = limiter, clock, now
        self.budgets = Budgets(limiter, costs, now, clock) if costs is not None else None
        self.expected, self.refused, self.guesses = Expected(), Refused(), Guesses()
        self.open: set[Ticket] = set()
        self._timer: asyncio.TimerHandle | None = None

    def ticket(self, plan: Plan, size: int = 0, anthropic: bool = False) -> Ticket:
        """For one request with a body of `size` bytes (0: unknown)."""
        return Ticket(self, plan, size, anthropic)

    def watch(self, ticket: Ticket) -> None:
        self.open.add(ticket)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.budgets is not None:
            await self.budgets.close()
        await self.limiter.close()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick) if self.open else None
        for ticket in self.open:
            ticket.extend()
        self.limiter.beat()


class Ticket(Grant):
    """Of one request: `enter`, then `tokens` as soon as its prompt is counted, then `close`, however it ended."""

    __slots__ = (
        "_answers", "_anthropic", "_bounded", "_closed", "_entry", "_gate", "_model", "_parts", "_plan", "_size",
        "_usage",
    )  # fmt: skip

    def __init__(self, gate: Gate, plan: Plan, size: int, anthropic: bool) -> None:
        self._gate, self._plan, self._size, self._anthropic = gate, plan, size, anthropic
        self._parts: list[Part] = []
        # what is still to be asked for, or owed by a request that ends before it asks
        self._entry: list[Part] = []
        self._usage: Callable[[], Usage] | None = None
        self._model, self._answers, self._bounded = "", 1, True
        self._closed = False

    async def enter(self) -> None:
        """A request more, and one more at once; together with its tokens where there is much room.

        Raises RateLimitError.
        """
        known = self._gate.refused.find(self._plan.whose, self._size, self._gate.clock)
        if known is not None:
            left, error = known
            raise error.again(left)
        parts = self._plan.before.entry()
        if self._gate.guesses.wait(parts):
            self._entry = parts
        else:
            await self._reserve(parts)

    async def tokens(self, model: str, prompt: int, most: int = 0, answers: int = 1, bounded: bool = True) -> int:
        self._model, self._answers, self._bounded = model, answers, bounded
        asked = self._plan.of(model)
        parts = [*self._entry, *asked.entry()]
        if asked.smallest is not None:
            parts += asked.tokens(self._amount(asked.smallest, prompt, most))
        money = await self._money(asked.budgets, prompt, most) if asked.budgets else []
        if parts or money:
            await self._reserve([*parts, *money])
        return min([self._affordable(part, prompt, most) for part in money], default=most)

    def follow(self, usage: Callable[[], Usage]) -> None:
        self._usage = usage
        if not self._bounded:
            self._gate.watch(self)

    def headers(self) -> dict[str, str]:
        levels = [part.level for part in self._parts if part.want.kind == RATE]
        return anthropic_headers(levels, self._gate.now()) if self._anthropic else openai_headers(levels)

    def extend(self) -> None:
        """What the answer has beyond its reservation is owed at once, not at its end."""
        if self._usage is None or self._bounded:
            return
        total = _total(self._usage())
        for part in self._parts:
            if part.of == "tokens" and part.by is not None and total > part.taken:
                part.by.settle([Change(RATE, part.want.key, part.want.limit, 0, total - part.taken)])
                part.taken = total

    def close(self, outcome: Outcome) -> None:
        if self._closed:
            return
        self._closed, self._usage = True, None
        self._gate.open.discard(self)
        usage = outcome.usage
        if usage is not None and not self._bounded and outcome.finish in _OWN_ENDS:
            self._gate.expected.note(self._model, usage.completion_tokens // self._answers)
        if usage is not None and not self._model:
            # nothing was reserved for it, but it was used
            unasked = self._plan.before.tokens(0)
            for part in unasked:
                part.by = self._gate.limiter
            self._parts += unasked
        changes: dict[Limiter, list[Change]] = {}
        total = _total(usage) if usage is not None else 0
        spent: int | None = None
        for part in self._parts:
            if part.by is None:
                continue
            if spent is None and part.want.kind == MONEY:
                spent = self._cost(usage)
            change = self._change(part, total, spent or 0)
            if change is not None:
                changes.setdefault(part.by, []).append(change)
        if self._entry:
            self._gate.guesses.done(self._entry)
            owed = [part.want for part in self._entry if part.want.kind == RATE]
            changes.setdefault(self._gate.limiter, []).extend(Change(RATE, one.key, one.limit, 0, 1) for one in owed)
        for by, settled in changes.items():
            by.settle(settled)

    # -- reserving -------------------------------------------------------------------------------------------------

    async def _reserve(self, parts: list[Part]) -> None:
        reserved = await self._gate.limiter.reserve([part.want for part in parts])
        decision, wants = reserved.decision, reserved.wants
        for part, want, left in zip(parts, wants, decision.left, strict=True):
            # its limit may be a share
            part.want, part.left = want, left
            if part.of in _ENTRY:
                self._gate.guesses.note(want, left)
        self._parts += parts
        lacking = None if decision.lacking is None else parts[decision.lacking]
        # who is refused for what it is as such has asked, who is for its size has sent a request
        if self._entry and (lacking is None or lacking.of in _ENTRY):
            self._gate.guesses.done(self._entry)
            self._entry = []
        if lacking is not None:
            self._refuse(lacking, decision.wait)
        for part, given in zip(parts, decision.given, strict=True):
            part.taken, part.by = given, reserved.by
            if part.want.kind != RATE:
                self._gate.watch(self)

    def _refuse(self, part: Part, wait: float) -> None:
        now = self._gate.now()
        error = refusal(part.quota, part.of, part.want, part.left, wait, now)
        size = 0 if part.of in _ENTRY else self._size
        if part.quota.model is None and (size or part.of != "tokens"):
            remembered = BUSY if part.want.kind == PLACES else min(wait, 1.0) if part.want.kind == MONEY else wait
            self._gate.refused.note(self._plan.whose, size, self._gate.clock() + remembered, error)
        raise error

    def _amount(self, smallest: Quota, prompt: int, most: int) -> int:
        """Prompt and answer. What the client bounded is reserved whole; else what answers of this model mostly have,
        and never more than a full bucket gives."""
        limit = smallest.tpm or 0
        if prompt + (most if self._bounded else 0) > limit:
            raise too_large(smallest, prompt, most if self._bounded else 0)
        if self._bounded:
            return prompt + most
        return min(prompt + min(most, self._gate.expected.of(self._model) * self._answers), limit)

    async def _money(self, bound: Sequence[Quota], prompt: int, most: int) -> list[Part]:
        budgets = self._gate.budgets
        if budgets is None:
            return []
        budgets.check(self._model)
        least = budgets.cost(self._model, Usage(prompt, min(most, self._answers)))
        amount = budgets.cost(self._model, Usage(prompt, most))
        return [
            Part(quota, "money", Want(MONEY, await budgets.key_of(quota), quota.budget.micros, amount, least))
            for quota in bound
            if quota.budget is not None and amount
        ]

    def _affordable(self, part: Part, prompt: int, most: int) -> int:
        """The tokens of all answers that what `part` has taken pays for, at most `most`."""
        budgets = self._gate.budgets
        assert budgets is not None
        if part.taken >= part.want.amount:
            return most
        costs = _Costs(budgets, self._model, prompt, most)
        return bisect_right(costs, part.taken) - 1

    def _cost(self, usage: Usage | None) -> int:
        budgets = self._gate.budgets
        return budgets.cost(self._model, usage) if usage is not None and budgets is not None else 0

    def _change(self, part: Part, total: int, spent: int) -> Change | None:
        """`total`: tokens; `spent`: micro-dollars."""
        want = part.want
        if want.kind == RATE:
            used = total - part.taken if part.of == "tokens" else 0
            return Change(RATE, want.key, want.limit, 0, used) if used else None
        if want.kind == PLACES:
            return Change(PLACES, want.key, want.limit, part.taken, 0)
        if self._gate.budgets is not None:
            self._gate.budgets.settled(want.key, spent)
        return Change(MONEY, want.key, want.limit, part.taken, spent)


class _Costs(Sequence[int]):
    """What each length costs, for a search by halves."""

    def __init__(self, budgets: Budgets, model: str, prompt: int, most: int) -> None:
        self._budgets, self._model, self._prompt, self._most = budgets, model, prompt, most

    def __len__(self) -> int:
        return self._most + 1

    def __getitem__(self, tokens: int) -> int:  # type: ignore[override]
        return self._budgets.cost(self._model, Usage(self._prompt, tokens))


def _total(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
