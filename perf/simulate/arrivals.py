"""Arrivals of requests at a simulated fleet: traces, and synthetic days of conversations."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path

from llmops.errors import InputError
from llmops.perf.report.document import Document
from llmops.perf.simulate.fleet import Arrivals
from llmops.perf.simulate.replica import SimulatedRequest
from llmops.perf.workloads.files import BLOCK_TOKENS, TraceEntry, read_trace
from llmops.perf.workloads.lengths import Lengths, parse_lengths

DAY = 86_400.0
PEAK_HOUR = 20 * 3600.0
#: Mean of the daily wave, which is the third power of a cosine scaled to the range 0 to 1.
DAILY_AMPLITUDE = 0.3125


@dataclass(frozen=True)
class ConversationArrivals:
    """Sessions of several turns.

    A prompt is a system prompt, which the users of an application share, followed by the
    conversation so far.

    Attributes:
        rate: Mean rate in requests per second.
        seconds: Length of the arrivals.
        turns: Number of turns of a session.
        system: Tokens of a system prompt.
        apps: Number of system prompts, whose frequencies follow Zipf's law.
        message: Distribution of the tokens of a message.
        answer: Distribution of the tokens of an answer.
        think: Mean seconds between an answer and the next turn.
        peak: Rate in the evening as a multiple of the mean; 1 for a constant rate.
        tenants: Number of tenants that share the requests evenly.
        flood: Requests of the first tenant as a multiple of another tenant's.
        tiers: Priority tiers of the requests, with their shares.
        block_tokens: Tokens of a cache block.
        seed: Seed of the random numbers.
    """

    rate: float
    seconds: float
    turns: Lengths = field(default_factory=lambda: parse_lengths("5"))
    system: int = 1300
    apps: int = 50
    message: Lengths = field(default_factory=lambda: parse_lengths("lognormal:250,0.6"))
    answer: Lengths = field(default_factory=lambda: parse_lengths("lognormal:334,0.6"))
    think: float = 30.0
    peak: float = 1.0
    tenants: int = 1
    flood: float = 1.0
    tiers: tuple[tuple[str, float], ...] = (("", 1.0),)
    block_tokens: int = 64
    seed: int = 0

    def arrivals(self) -> Arrivals:
        talk = _ConversationState(self)
        return Arrivals(talk.first(), talk.next)


# The three distributions of a turn: message tokens, answer tokens, and seconds before the message.
_Turn = tuple[int, int, float]


class _ConversationState:
    def __init__(self, spec: ConversationArrivals) -> None:
        self.spec, self._rng = spec, random.Random(f"conversations {spec.seed}")
        self._named = 1
        shared = spec.system // spec.block_tokens
        self._system: list[list[int]] = [[] for _ in range(spec.apps)]
        for blocks in self._system:
            self._fill(blocks, shared)
        self._popular = list(accumulate(1 / (rank + 1) for rank in range(spec.apps)))
        self._tenants = [f"tenant-{number}" for number in range(spec.tenants)]
        self._demand = list(accumulate([spec.flood, *[1.0] * (spec.tenants - 1)]))
        self._tiers = list(accumulate(share for _, share in spec.tiers))
        # The remaining turns of a session and its blocks so far, by the session's last request.
        self._open: dict[SimulatedRequest, tuple[list[_Turn], list[int]]] = {}
        self._sessions = count(1)

    def first(self) -> Iterator[SimulatedRequest]:
        """Yield the first request of each session, at a rate that accounts for the later turns.

        A whole session is drawn at its start, so that it does not depend on the answers to other
        sessions.
        """
        spec, rng = self.spec, self._rng
        drawn = random.Random("turns")
        mean = sum(spec.turns.draw(drawn) for _ in range(2000)) / 2000
        highest = spec.peak
        now = 0.0
        while True:
            now += rng.expovariate(highest * spec.rate / mean)
            if now >= spec.seconds:
                return
            if rng.random() * highest > self._level(now):
                continue
            app = _drawn(rng, self._popular)
            tenant = self._tenants[_drawn(rng, self._demand)]
            tier = spec.tiers[_drawn(rng, self._tiers)][0]
            turns = [self._turn() for _ in range(spec.turns.draw(rng))]
            turns.reverse()
            session = next(self._sessions)
            yield self._job(now, spec.system, list(self._system[app]), tenant, tier, 0, session, turns)

    def next(self, last: SimulatedRequest) -> tuple[float, SimulatedRequest] | None:
        """Return the seconds until the next turn and its request, or None at the end of a session.

        A user whose request was rejected does not return.
        """
        turns, blocks = self._open.pop(last, ([], []))
        if not turns or last.refused >= 0 or last.failed:
            return None
        *_, pause = turns[-1]
        if last.end + pause >= self.spec.seconds:
            return None
        before, turn = last.tokens + last.answer, last.turn + 1
        return pause, self._job(0.0, before, blocks, last.tenant, last.tier, turn, last.session, turns)

    def _turn(self) -> _Turn:
        spec, rng = self.spec, self._rng
        pause = rng.expovariate(1 / spec.think) if spec.think else 0.0
        return spec.message.draw(rng), spec.answer.draw(rng), pause

    def _level(self, now: float) -> float:
        """Return the rate at a time of the day as a multiple of the mean rate."""
        peak = self.spec.peak
        wave = (1 + math.cos(2 * math.pi * (now - PEAK_HOUR) / DAY)) / 2
        night = (1 - DAILY_AMPLITUDE * peak) / (1 - DAILY_AMPLITUDE)
        return night + (peak - night) * wave**3

    def _job(
        self,
        when: float,
        before: int,
        blocks: list[int],
        tenant: str,
        tier: str,
        turn: int,
        session: int,
        turns: list[_Turn],
    ) -> SimulatedRequest:
        size, (message, answer, _) = self.spec.block_tokens, turns.pop()
        tokens = before + message
        self._fill(blocks, tokens // size)
        prompt = tuple(blocks)
        self._fill(blocks, (tokens + answer) // size)
        job = SimulatedRequest(when, tokens, answer, prompt, tuple(blocks[len(prompt) :]), tenant, tier, turn, session)
        if turns:
            self._open[job] = (turns, blocks)
        return job

    def _fill(self, blocks: list[int], size: int) -> None:
        count = size - len(blocks)
        if count > 0:
            blocks += range(self._named, self._named + count)
            self._named += count


def _drawn(rng: random.Random, cumulated: Sequence[float]) -> int:
    """Return one random index as `random.choices` does, but faster."""
    return bisect(cumulated, rng.random() * cumulated[-1], 0, len(cumulated) - 1)


def arrivals_from_trace(path: Path) -> Arrivals:
    """Return the arrivals in a trace of Mooncake's format.

    Raise InputError if the trace is invalid.
    """
    names: dict[tuple[int, int], int] = {}
    return Arrivals(iter([_of_entry(entry, names) for entry in read_trace(path)]))


def _of_entry(entry: TraceEntry, names: dict[tuple[int, int], int]) -> SimulatedRequest:
    """Return the request of an entry of the trace.

    A block that follows different blocks counts as a different block, as in a prefix cache. `names`
    has the number of each pair of the previous block and the trace's block; new pairs are added.
    """
    whole, before, blocks = entry.input_length // BLOCK_TOKENS, 0, []
    for block in entry.hash_ids[:whole]:
        before = names.setdefault((before, block), len(names) + 1)
        blocks.append(before)
    return SimulatedRequest(entry.at, entry.input_length, entry.output_length, tuple(blocks))


def arrivals_from_bench(document: Document) -> Arrivals:
    """Return the requests of a `llmops bench --json` report, with the same times and lengths.

    Raises:
        InputError: The report has no token counts.
    """
    jobs = []
    for record in document.records:
        if record["tokens_in"] is None:
            raise InputError("This run has no counts of prompt tokens; repeat it with a server that sends usage.")
        answer = max(record["tokens_out"], 1)
        jobs.append(SimulatedRequest(record["start"], record["tokens_in"], answer, turn=record["turn"]))
    return Arrivals(iter(sorted(jobs, key=lambda job: job.arrived)))
