"""The results of a simulated run.

They are records as in `llmops bench`, and sums that only a simulation has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from llmops.gateway.routing.admission.fair_queue import service_cost
from llmops.perf.records import Record
from llmops.perf.simulate.fleet import FleetSpec, SimulationOutcome
from llmops.perf.simulate.replica import SimulatedRequest

REFUSED, FAILED = "overloaded", "engine_unavailable"


@dataclass
class SimulationTotals:
    """Sums over the requests and replicas of a run. The totals of several cells can be added.

    Attributes:
        replicas: Number of replicas.
        gpus: Number of GPUs.
        gpu_seconds: Seconds of all GPUs together while requests arrive.
        dollars: Cost of `gpu_seconds`.
        busy_seconds: Seconds in which replicas worked.
        replica_seconds: Duration of the run times the number of replicas.
        prompt_tokens: Prompt tokens of answered requests.
        answer_tokens: Tokens of the answers.
        cached_tokens: Prompt tokens found in the cache.
        seen_tokens: Prompt tokens that an earlier request of the run had.
        refused: Number of rejected requests.
        failed: Number of failed requests.
        moved: Number of failovers.
        longest_queue: Longest queue inside an engine.
        busiest: Share of the time in which the busiest replica worked.
        requests: Number of requests of each replica.
        scaled: Changes of the number of replicas, as (seconds, number).
        degraded: Changes of the level of degraded mode, as (seconds, level).
        rollout: Changes of the new version's percentage, as (seconds, percentage).
        served: Cost of the requests by tenant, as fairness counts it.
        drained: Time in seconds of the last end of an answer, by tier.
    """

    replicas: int = 0
    gpus: int = 0
    gpu_seconds: float = 0.0
    dollars: float = 0.0
    busy_seconds: float = 0.0
    replica_seconds: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    seen_tokens: int = 0
    refused: int = 0
    failed: int = 0
    moved: int = 0
    longest_queue: int = 0
    busiest: float = 0.0
    requests: list[int] = field(default_factory=list)
    scaled: list[tuple[float, int]] = field(default_factory=list)
    degraded: list[tuple[float, int]] = field(default_factory=list)
    rollout: list[tuple[float, float]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    drained: Counter[str] = field(default_factory=Counter)

    def add(self, other: SimulationTotals) -> None:
        for one in fields(self):
            mine, more = getattr(self, one.name), getattr(other, one.name)
            if one.name == "drained":
                self.drained |= more
            else:
                setattr(self, one.name, max(mine, more) if one.name in ("longest_queue", "busiest") else mine + more)

    @property
    def hit_rate(self) -> float:
        """Return the share of prompt tokens that were found in the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ceiling(self) -> float:
        """Return the share of prompt tokens that one unlimited cache would have found."""
        return self.seen_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Return the requests of the busiest replica, divided by the mean of all replicas."""
        mean = sum(self.requests) / len(self.requests) if self.requests else 0.0
        return max(self.requests) / mean if mean else 0.0

    @property
    def jain(self) -> float:
        """Return Jain's fairness index of the tenants.

        The index is 1 if all tenants got equal parts, and 1/n if one of n tenants got everything.
        """
        parts = list(self.served.values())
        return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts)) if any(parts) else 1.0

    @property
    def busy(self) -> float:
        """Return the mean share of the time in which replicas worked."""
        return self.busy_seconds / self.replica_seconds if self.replica_seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures for the JSON document, by name."""
        shares = ("hit_rate", "ceiling", "imbalance", "busy", "busiest")
        rounded = {name: round(getattr(self, name), 4) for name in shares}
        tokens = self.prompt_tokens + self.answer_tokens
        return {
            **rounded,
            "replicas": self.replicas,
            "gpus": self.gpus,
            "gpu_hours": round(self.gpu_seconds / 3600, 3),
            "dollars": round(self.dollars, 2),
            "dollars_per_million_tokens": round(1e6 * self.dollars / tokens, 4) if tokens else None,
            "dollars_per_million_answer_tokens": (
                round(1e6 * self.dollars / self.answer_tokens, 4) if self.answer_tokens else None
            ),
            "refused": self.refused,
            "failed": self.failed,
            "moved": self.moved,
            "longest_queue": self.longest_queue,
            "drained": {tier or "all": round(end, 1) for tier, end in self.drained.items()},
            **({"scaled": self.scaled} if self.scaled else {}),
            **({"degraded": self.degraded} if self.degraded else {}),
            **({"rollout": self.rollout} if self.rollout else {}),
        }


def sum_up(outcome: SimulationOutcome, skipped: float = 0.0) -> SimulationTotals:
    """Return the totals of a run. Requests that arrived before `skipped` seconds do not count."""
    spec = outcome.spec
    seconds = outcome.seconds
    found = SimulationTotals(
        replicas=spec.replicas, gpus=spec.replicas * spec.engine.gpus, longest_queue=_longest(outcome)
    )
    found.busy_seconds, found.replica_seconds = sum(outcome.busy.values()), seconds * spec.replicas
    found.busiest = max(outcome.busy.values()) / seconds if seconds else 0.0
    # The cost counts while requests arrive, not until the last answer is complete.
    measured = max(max((job.arrived for job in outcome.jobs), default=0.0) - skipped, 0.0)
    found.gpu_seconds = spec.engine.gpus * outcome.replica_seconds(skipped, skipped + measured)
    found.scaled = [(when, count) for when, count in outcome.scaled if when >= skipped]
    found.degraded = [(when, level) for when, level in outcome.degraded if when >= skipped]
    found.rollout = list(outcome.rollout)
    found.dollars = found.gpu_seconds / 3600 * spec.engine.price
    counts: Counter[str] = Counter()
    for job, seen in _seen(outcome.jobs, spec.engine.block_tokens):
        if job.arrived < skipped:
            continue
        found.refused += job.refused >= 0
        found.failed += job.failed
        found.moved += job.moves
        if job.refused >= 0 or job.failed:
            continue
        found.prompt_tokens += job.tokens
        found.answer_tokens += job.answer
        found.cached_tokens += job.cached
        found.seen_tokens += min(seen, job.tokens - 1)
        found.served[job.tenant] += int(service_cost(job.tokens, job.answer))
        counts[job.replica] += 1
        found.drained[job.tier] = max(found.drained[job.tier], job.end)  # type: ignore[assignment]
    found.requests = [counts[name] for name in outcome.busy]
    return found


def records(jobs: Iterable[SimulatedRequest], skipped: float = 0.0, added: float = 0.0) -> list[Record]:
    """Return the records of the requests as a load generator would have written them.

    Requests that arrive in the first `skipped` seconds have no record. Answers arrive `added`
    seconds later. Tokens are evenly spaced, so a record has only two arrival times: of the first
    and the last token.
    """
    return [_record(job, added) for job in jobs if job.arrived >= skipped]


def _record(job: SimulatedRequest, added: float) -> Record:
    error = REFUSED if job.refused >= 0 else FAILED if job.failed else None
    record = Record(job.arrived, end=job.end + added, counted=False, requested=job.answer, turn=job.turn, error=error)
    record.tokens_in = job.tokens
    if error is None:
        record.first, record.tokens_out, record.finish = job.first + added, job.answer, "length"
        record.chunks = [record.first, record.end]
    return record


def _longest(outcome: SimulationOutcome) -> int:
    return max(outcome.queues.values(), default=0)


def _seen(jobs: Sequence[SimulatedRequest], size: int) -> Iterable[tuple[SimulatedRequest, int]]:
    """Yield each request with the number of its prompt tokens that an earlier request had.

    Only whole blocks of `size` tokens at the beginning of the prompt count.
    """
    known: set[int] = set()
    for job in sorted(jobs, key=lambda one: one.arrived):
        count = 0
        for name in job.hashes:
            if name not in known:
                break
            count += 1
        known.update(job.hashes)
        if job.refused < 0 and not job.failed:
            known.update(job.after)
        yield job, count * size


def spec_of(spec: FleetSpec) -> dict[str, Any]:
    """Return the description of the fleet for the JSON document."""
    return {
        "policy": spec.policy,
        "gate": bool(spec.tiers),
        "replicas": spec.replicas,
        "gateways": spec.gateways,
        "engine": spec.engine.name,
        "blocks": spec.engine.blocks,
        "block_tokens": spec.engine.block_tokens,
        "max_batch_size": spec.engine.max_batch_size,
        "max_num_tokens": spec.engine.max_num_tokens,
        "failures": [f"{one.replica}@{one.at:g}+{one.back:g}" for one in spec.failures],
        "seed": spec.seed,
    }
