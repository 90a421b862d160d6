"""What a request meets: its quotas become reservations, and its end makes them what it really used."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime
from time import monotonic

from llmops.clocks import utc_now
from llmops.gateway.callers.limits.base import Limiter
from llmops.gateway.callers.limits.buckets import MONEY, PLACES, RATE, Change, Decision, Want, change_of, want_of
from llmops.gateway.callers.limits.budgets import Budgets, Costs, Tariff
from llmops.gateway.callers.limits.expected import Expected
from llmops.gateway.callers.limits.headers import anthropic_headers, openai_headers
from llmops.gateway.callers.limits.plan import Asked, Guesses, Plan, Taken, Term
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
        "_answers", "_anthropic", "_bounded", "_closed", "_gate", "_model", "_owes", "_plan", "_size", "_taken",
        "_tariff", "_usage",
    )  # fmt: skip

    def __init__(self, gate: Gate, plan: Plan, size: int, anthropic: bool) -> None:
        self._gate, self._plan, self._size, self._anthropic = gate, plan, size, anthropic
        self._taken: list[Taken] = []
        # its entry is still to be asked for, or owed by a request that ends before it asks
        self._owes = False
        self._usage: Callable[[], Usage] | None = None
        # what its money was reserved by, and is settled by
        self._tariff: Tariff | None = None
        self._model, self._answers, self._bounded = "", 1, True
        self._closed = False

    async def enter(self) -> None:
        """A request more, and one more at once; together with its tokens where there is much room.

        Raises RateLimitError.
        """
        gate, before = self._gate, self._plan.before
        known = gate.refused.find(self._plan.whose, self._size, gate.clock)
        if known is not None:
            left, error = known
            raise error.again(left)
        if not before.wants:
            return
        if gate.guesses.wait(before.wants):
            self._owes = True
        else:
            await self._reserve(before, before.wants)

    async def tokens(self, model: str, prompt: int, most: int = 0, answers: int = 1, bounded: bool = True) -> int:
        self._model, self._answers, self._bounded = model, answers, bounded
        asked = self._plan.of(model, self._owes)
        wants = [*asked.wants]
        if asked.smallest is not None:
            amount = self._amount(asked.smallest, prompt, most)
            wants += [want_of((RATE, key, limit, amount, 0)) for _, _, key, limit in asked.rates]
        money = await self._money(asked.budgets, prompt, most) if asked.budgets else []
        wants += money
        if not wants:
            return most
        taken = await self._reserve(asked, wants)
        given = min(taken.taken[-len(money) :]) if money else 0
        return self._affordable(given, prompt, most) if money and given < money[0].amount else most

    def follow(self, usage: Callable[[], Usage]) -> None:
        self._usage = usage
        if not self._bounded:
            self._gate.watch(self)

    def headers(self) -> dict[str, str]:
        levels = [level for one in self._taken for level in one.levels()]
        return anthropic_headers(levels, self._gate.now()) if self._anthropic else openai_headers(levels)

    def extend(self) -> None:
        """What the answer has beyond its reservation is owed at once, not at its end."""
        if self._usage is None or self._bounded:
            return
        total = _total(self._usage())
        for one in self._taken:
            for at, (term, want, taken) in enumerate(one):
                if term.of == "tokens" and total > taken:
                    one.by.settle([Change(RATE, want.key, want.limit, 0, total - taken)])
                    one.taken[at] = total

    def close(self, outcome: Outcome) -> None:
        if self._closed:
            return
        self._closed, self._usage = True, None
        gate, usage = self._gate, outcome.usage
        gate.open.discard(self)
        if usage is not None and not self._bounded and outcome.finish in _OWN_ENDS:
            gate.expected.note(self._model, usage.completion_tokens // self._answers)
        total = _total(usage) if usage is not None else 0
        owed: list[Change] = []
        if self._owes:
            gate.guesses.done()
            owed += [Change(RATE, one.key, one.limit, 0, 1) for one in self._plan.before.wants if one.kind == RATE]
        if total and not self._model:
            # nothing was reserved for it, but it was used
            owed += [Change(RATE, one.key, one.limit, 0, total) for one in self._plan.before.rates]
        for taken in self._taken:
            changes = self._changes(taken, usage, total)
            if taken.by is gate.limiter:
                owed += changes
            elif changes:
                taken.by.settle(changes)
        if owed:
            gate.limiter.settle(owed)

    # -- reserving -------------------------------------------------------------------------------------------------

    async def _reserve(self, asked: Asked, wants: Sequence[Want]) -> Taken:
        """`wants`: one for each of its terms, but none for money that is not needed."""
        gate = self._gate
        reserved = await gate.limiter.reserve(wants)
        taken = Taken(asked, reserved)
        self._taken.append(taken)
        decision = reserved.decision
        lacking = decision.lacking
        gate.guesses.note(asked.keys, decision.left)
        # who is refused for what it is as such has asked, who is for its size has sent a request
        if self._owes and (lacking is None or lacking < len(asked.keys)):
            gate.guesses.done()
            self._owes = False
        if lacking is not None:
            self._refuse(asked.terms[lacking], reserved.wants[lacking], decision)
        if self._plan.holds:
            gate.watch(self)
        return taken

    def _refuse(self, term: Term, want: Want, decision: Decision) -> None:
        assert decision.lacking is not None
        now, wait = self._gate.now(), decision.wait
        error = refusal(term.quota, term.of, want, decision.left[decision.lacking], wait, now)
        size = 0 if term.of in _ENTRY else self._size
        if term.quota.model is None and (size or term.of != "tokens"):
            remembered = BUSY if want.kind == PLACES else min(wait, 1.0) if want.kind == MONEY else wait
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

    async def _money(self, bound: Sequence[Term], prompt: int, most: int) -> list[Want]:
        """One for each; none of what costs nothing."""
        budgets = self._gate.budgets
        if budgets is None:
            return []
        self._tariff = tariff = budgets.tariff(self._model)
        amount = tariff(Usage(prompt, most))
        if not amount:
            return []
        least = tariff(Usage(prompt, min(most, self._answers)))
        keys = [budgets.known(term.quota) or await budgets.look(term.quota) for term in bound]
        return [want_of((MONEY, key, term.limit, amount, least)) for key, term in zip(keys, bound, strict=True)]

    def _affordable(self, given: int, prompt: int, most: int) -> int:
        """The longest answer that `given` pays for, of at most `most` tokens."""
        assert self._tariff is not None
        return bisect_right(_Costs(self._tariff, prompt, most), given) - 1

    # -- settling --------------------------------------------------------------------------------------------------

    def _changes(self, one: Taken, usage: Usage | None, total: int) -> list[Change]:
        """What makes of the reservation what was used: `total` tokens."""
        changes = []
        spent: int | None = None
        for term, (kind, key, limit, _, _), taken in one:
            if kind == RATE:
                if term.of == "tokens" and total != taken:
                    changes.append(change_of((RATE, key, limit, 0, total - taken)))
            elif kind == PLACES:
                changes.append(change_of((PLACES, key, limit, taken, 0)))
            else:
                budgets, tariff = self._gate.budgets, self._tariff
                assert budgets is not None
                assert tariff is not None
                if spent is None:
                    spent = tariff(usage) if usage is not None else 0
                budgets.settled(key, spent)
                changes.append(change_of((MONEY, key, limit, taken, spent)))
        return changes


class _Costs(Sequence[int]):
    """What each length costs, for a search by halves."""

    def __init__(self, tariff: Tariff, prompt: int, most: int) -> None:
        self._tariff, self._prompt, self._most = tariff, prompt, most

    def __len__(self) -> int:
        return self._most + 1

    def __getitem__(self, tokens: int) -> int:  # type: ignore[override]
        return self._tariff(Usage(self._prompt, tokens))


def _total(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
