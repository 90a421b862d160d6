"""The ways in which a replica is taken from under its streams, and what the clients saw of it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from bisect import bisect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from llmops.errors import ServerError
from tests.faults.kills.replicas import Pair, Replica
from tests.faults.kills.streams import Load, Question, Told

# a fault comes at a random time within so many seconds after all streams have begun
SPREAD = 1.0


@dataclass
class Seen:
    """`times`: of the fault. `failed`, `different`: answers, with the first of each; `moved`: those that went on
    elsewhere, and the `pauses` (s) in these, with the `reread`: tokens of all that went on elsewhere in that round,
    which are read again in one go; `moves`: as the gateway counts, by reason; `drains`: seconds from SIGTERM to the end
    of a replica; `begun`: when each fault came (perf_counter); `trouble`: why there were no more of them."""

    times: int = 0
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    different: list[tuple[Question, Told]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    reread: list[int] = field(default_factory=list)
    splices: Counter[str] = field(default_factory=Counter)
    moves: dict[str, float] = field(default_factory=dict)
    drains: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    trouble: str = ""

    def judge(self, load: Load, right: Mapping[Question, Told]) -> None:
        tokens, rounds = Counter[int](), []
        for question, told in load.ended:
            self.answers += 1
            if told.error:
                self.failed.append(told.error)
            elif not told.same(right[question]):
                self.different.append((question, told))
            if told.splices:
                self.splices[told.splices] += 1
                self.pauses.append(told.pause())
                when, known = told.resumed()
                rounds.append(bisect(self.begun, when))
                tokens[rounds[-1]] += known
        self.reread = [tokens[one] for one in rounds]


Fault = Callable[[Pair, Replica, Seen, Load], Awaitable[None]]


async def killed(pair: Pair, replica: Replica, seen: Seen, load: Load) -> None:
    """`kill -9`, and a new start when the answers of that moment are whole: a start takes all cores of a small machine,
    which would be in their pauses."""
    await asyncio.to_thread(replica.kill)
    await load.renewed()
    replica.start()


async def stopped(pair: Pair, replica: Replica, seen: Seen, load: Load) -> None:
    """SIGSTOP: it hangs, with its connections open, until the gateway has given it up; then it is killed, as a liveness
    probe would, and started anew."""
    replica.tell(signal.SIGSTOP)
    await pair.until(lambda states: states[replica.address] != "ready")
    await asyncio.sleep(SPREAD)
    await killed(pair, replica, seen, load)


async def restarted(pair: Pair, replica: Replica, seen: Seen, load: Load) -> None:
    """SIGTERM, wait until it has drained, and start it anew."""
    begun = time.perf_counter()
    replica.drain()
    status = await asyncio.to_thread(replica.wait)
    seen.drains.append(time.perf_counter() - begun)
    assert status == 0, replica.log[-2000:]
    replica.start()


async def rounds(
    pair: Pair,
    fault: Fault,
    times: int,
    right: Mapping[Question, Told],
    seed: int = 0,
    seconds: float = float("inf"),
) -> Seen:
    """One replica after the other that has streams, under one stream per question: `times` in all, or as often as
    `seconds` allow."""
    seen, chance = Seen(), random.Random(seed)
    before, until = _moves(pair), time.monotonic() + seconds
    async with Load(pair.url, list(right)) as load:
        for turn in range(times):
            try:
                await pair.all_ready()
            except ServerError as error:
                # what was seen before is worth telling
                seen.trouble = str(error)
            if seen.trouble or time.monotonic() > until:
                break
            seen.times += 1
            await load.in_flight()
            await asyncio.sleep(chance.uniform(0, SPREAD))
            own = await asyncio.to_thread(pair.own)
            in_turn = pair.replicas[turn % len(pair.replicas) :] + pair.replicas[: turn % len(pair.replicas)]
            seen.begun.append(time.perf_counter())
            await fault(pair, next(one for one in in_turn if own[one.address]), seen, load)
        if not seen.trouble:
            await pair.all_ready()
    seen.judge(load, right)
    seen.moves = {reason: count - before[reason] for reason, count in _moves(pair).items() if count > before[reason]}
    return seen


def _moves(pair: Pair) -> dict[str, float]:
    reasons = ("lost", "failed", "refused", "drain", "suspect", "preempted")
    return {one: pair.front.metric(rf'llmops_failovers_total\{{reason="{one}"\}}') for one in reasons}
