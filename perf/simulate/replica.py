"""A simulated replica with continuous batching, chunked prefill and a prefix cache.

Time advances from one change of the batch to the next, instead of step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import floor
from random import Random
from typing import Any

from llmops.gateway.interfaces import QueuedRequest, ReplicaView, RoutingRequest
from llmops.gateway.routing.cost_model import ReportedSteps
from llmops.gateway.routing.replicas.load_estimator import EngineGauges
from llmops.perf.simulate.clock import Clock
from llmops.perf.simulate.engine import EngineSpec
from llmops.perf.simulate.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A simulated request. Times are in seconds, and negative before the event.

    Attributes:
        arrived: Time of arrival.
        tokens: Number of prompt tokens.
        answer: Number of answer tokens.
        hashes: Hashes of the prompt's whole blocks.
        after: Hashes of the answer's whole blocks.
        tenant: The tenant.
        tier: The priority tier.
        turn: Number of the turn in its session.
        session: Number of the session. All turns of a conversation have the same number.
        first: Time of the first token.
        end: Time of the last token.
        cached: Number of prompt tokens found in the cache.
        refused: Retry-After of a rejection in seconds.
        failed: True if the request failed.
        made: Number of answer tokens that the client has.
        moves: Number of failovers.
        replica: Name of the replica.
        gateway: Number of the gateway.
    """

    arrived: float
    tokens: int
    answer: int
    hashes: Sequence[int] = ()
    after: Sequence[int] = ()
    tenant: str = ""
    tier: str = ""
    turn: int = 0
    session: int = 0
    first: float = -1.0
    end: float = -1.0
    cached: int = 0
    refused: float = -1.0
    failed: bool = False
    made: int = 0
    moves: int = 0
    replica: str = ""
    gateway: int = 0
    # Fields of a request on a replica: cached blocks of the prompt, tokens still to prefill, needed
    # blocks, and blocks reserved for the answer.
    known: int = 0
    left: int = 0
    blocks: int = 0
    answer_blocks: int = 0
    # Prompt tokens, including the answer tokens that an earlier replica generated.
    known_tokens: int = field(init=False, repr=False)
    queued_request: QueuedRequest = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.known_tokens = self.tokens
        wanted = RoutingRequest(self.tokens, answer=self.answer, hashes=self.hashes)
        self.queued_request = QueuedRequest(self.tenant, wanted, self.arrived, self.tier, payload=self)

    def shorten(self, answer: int) -> None:
        """Limit the answer to `answer` tokens. Call this only before the request is sent."""
        if self.answer > answer:
            self.answer = answer
            self.queued_request.routing.answer = answer


#: Share of steps that take ten times as long if step times have noise.
OUTLIERS = 0.005


@dataclass(frozen=True)
class ReplicaVariation:
    """Deviations of one replica from its engine's specification.

    Attributes:
        reports: True if the replica sends its state and cache changes with each step. Otherwise
            gateways see only tokens and gauges.
        noise: Standard deviation of the logarithm of a step's time. With noise, 1 of 200 steps also
            takes ten times as long.
        factor: Factor of the step times.
        seed: Seed of the noise.
    """

    reports: bool = True
    noise: float = 0.0
    factor: float = 1.0
    seed: str = ""


class _View(ReplicaView):
    """A gateway's view of a replica.

    `step_seconds`, the mean duration of the replica's last steps, is computed only when a gateway
    reads it, because most steps pass unread.
    """

    def __init__(self, replica: SimulatedReplica) -> None:
        self._replica = replica
        super().__init__(**_fields(replica), free_blocks=replica.spec.blocks, blocks=replica.spec.blocks)

    @property
    def step_seconds(self) -> float:  # type: ignore[override]
        return self._replica.mean_step()

    @step_seconds.setter
    def step_seconds(self, seconds: float) -> None: ...


def _fields(replica: SimulatedReplica) -> dict[str, Any]:
    """Return the fields of a view that are the same for every replica of a fleet."""
    spec = replica.spec
    return {
        "replica_id": replica.name,
        "state": "ready",
        "tokens_per_block": spec.block_tokens,
        "max_batch_size": spec.max_batch_size,
    }


class SimulatedReplica:
    """A simulated replica.

    `views` are the gateways' views of the replica, which change with each step.
    """

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        clock: Clock,
        done: Callable[[SimulatedRequest], None],
        changed: Callable[[SimulatedReplica], None],
        conduct: ReplicaVariation | None = None,
        token: Callable[[SimulatedRequest], None] = lambda job: None,
    ) -> None:
        """Create an idle replica.

        Args:
            name: Name of the replica.
            spec: The engine's limits and step times.
            clock: The simulated time.
            done: A function that is called with each request that ends.
            changed: A function that is called when the replica's state has changed.
            conduct: Deviations from the engine's specification, or None.
            token: A function that is called with a request at each token, if the replica reports no
                state.
        """
        self.name, self.spec, self.clock = name, spec, clock
        self.conduct = conduct or ReplicaVariation()
        self._by_step = not self.conduct.reports or self.conduct.noise > 0
        self._rng, self._token = Random(f"{self.conduct.seed} {name}"), token
        self.cache = PrefixCache(spec.blocks)
        self.views: list[ReplicaView] = []
        self.queue: deque[SimulatedRequest] = deque()
        self.longest_queue = self.busy = 0.0
        self._done, self._changed = done, changed
        self._reading: deque[SimulatedRequest] = deque()
        # Entries are (step at whose end the request ends, number in the order of beginning,
        # request).
        self._running: list[tuple[int, int, SimulatedRequest]] = []
        self._steps = self._begun = 0
        # Tokens of running sequences now and at their beginning, and blocks reserved for their
        # answers.
        self._context = self._beginning = self._answers = 0
        # The current steps: their start, the seconds of one step, and their number. With parts of
        # prompts, there is only one step.
        self._since, self._seconds, self._count = 0.0, 0.0, 0
        self._chunks: list[tuple[SimulatedRequest, int]] = []
        self._version = 0
        self._idle = True
        self._reported = ReportedSteps()

    @property
    def waiting(self) -> int:
        """Return the number of requests without a first token."""
        return len(self.queue) + len(self._reading)

    @property
    def gauges(self) -> EngineGauges:
        """Return the gauges that a server's metrics page would have."""
        spec, active = self.spec, self.waiting + len(self._running)
        return EngineGauges(active, self.waiting, spec.blocks, self.cache.free, spec.block_tokens)

    def submit(self, job: SimulatedRequest) -> None:
        """Accept a request. The request joins the batch when the current step ends."""
        job.replica = self.name
        self.queue.append(job)
        if self._idle:
            self._begin()
        elif not self._chunks:
            passed = floor((self.clock.now - self._since) / self._seconds) + 1
            if passed < self._count:
                self._plan(passed)

    def fail(self) -> list[SimulatedRequest]:
        """Lose the cache and all requests, and return these requests."""
        lost = [*(job for _, _, job in self._running), *self._reading, *self.queue]
        if not self._idle and not self._chunks:
            # The tokens that clients have received so far.
            passed = min(floor((self.clock.now - self._since) / self._seconds), self._count)
            self._steps += passed
        for end, _, job in self._running:
            job.made = job.answer - max(end - self._steps, 1)
        self._version += 1
        self._idle = True
        self._running, self._context, self._beginning, self._answers = [], 0, 0, 0
        self._reading.clear()
        self.queue.clear()
        self._chunks = []
        self.cache.clear()
        return lost

    def _plan(self, count: int) -> None:
        """Schedule the next change of the batch, which comes after `count` of the current steps."""
        self._version += 1
        self._count = count
        self.clock.at(self._since + count * self._seconds, self._end, self._version)

    def _begin(self) -> None:
        if self.queue:
            self._admit()
        self._idle = False
        self._since = self.clock.now
        batch = len(self._running)
        length = self._context / batch if batch else 0.0
        if self._reading:
            self._read(batch, length)
        elif batch:
            self._seconds = self._took(self.spec.steps.decode(batch, length))
            self._plan(1 if self._by_step else self._running[0][0] - self._steps)
        else:
            self._idle = True

    def _read(self, batch: int, length: float) -> None:
        """Begin a step of `batch` decoding sequences and as many prompt tokens as fit.

        `length` is the mean number of tokens of the decoding sequences.
        """
        room = max(self.spec.max_num_tokens - batch, 1)
        tokens, before = 0, self._reading[0].known_tokens - self._reading[0].left
        for job in self._reading:
            part = min(job.left, room - tokens)
            self._chunks.append((job, part))
            tokens += part
            if tokens == room:
                break
        self._seconds = self._took(self.spec.steps.read(batch, length, tokens, before))
        self._plan(1)

    def _took(self, seconds: float) -> float:
        """Return the time of a step, with the replica's noise and factor.

        `seconds` is the time by the engine's specification.
        """
        conduct = self.conduct
        if conduct.noise:
            seconds *= self._rng.lognormvariate(0.0, conduct.noise) * (10.0 if self._rng.random() < OUTLIERS else 1.0)
        return seconds * conduct.factor

    def _admit(self) -> None:
        queue, size = self.queue, self.spec.block_tokens
        while queue and len(self._running) + len(self._reading) < self.spec.max_batch_size:
            job = queue[0]
            hashes = job.queued_request.routing.hashes or ()
            job.blocks = -(-(job.tokens + job.answer) // size)
            known = self.cache.start(hashes, job.blocks)
            if known is None:
                if self._running or self._reading:
                    break
                # The request needs more blocks than the cache has, so no replica can serve it.
                queue.popleft()
                job.failed, job.end = True, self.clock.now
                self._done(job)
                continue
            queue.popleft()
            job.known = known
            job.answer_blocks = job.blocks - -(-job.known_tokens // size)
            self._answers += job.answer_blocks
            cached = min(known * size, job.known_tokens - 1)
            job.left = job.known_tokens - cached
            if not job.moves:
                job.cached = cached
            self._reading.append(job)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        count, running = self._count, self._running
        self.busy += count * self._seconds
        self._reported.add(self._seconds, sum(part for _, part in self._chunks), count)
        self._steps += count
        self._context += count * len(running)
        decoding = [] if self.conduct.reports else [job for _, _, job in running]
        if self._chunks:
            self._was_read()
        if not self.conduct.reports:
            for job in decoding:
                self._token(job)
            for _, _, job in running:
                if job not in decoding:
                    self._token(job)
        self._use()
        if running and running[0][0] <= self._steps:
            while running and running[0][0] <= self._steps:
                self._leave(heappop(running)[2])
            self._use()
        self._begin()
        self._tell()

    def _use(self) -> None:
        """Update the number of empty blocks among the blocks reserved for answers.

        The tokens of all answers are counted as if the answers shared blocks.
        """
        unused = self._answers + (self._beginning - self._context) // self.spec.block_tokens
        self.cache.use(unused if unused > 0 else 0)

    def _was_read(self) -> None:
        now = self.clock.now
        for job, part in self._chunks:
            job.left -= part
            if job.left:
                break
            self._reading.popleft()
            self.cache.was_read(job.queued_request.routing.hashes or (), job.known)
            if job.first < 0:
                job.first = now
            self._begun += 1
            self._context += job.known_tokens
            self._beginning += job.known_tokens
            heappush(self._running, (self._steps + job.answer - job.made - 1, self._begun, job))
        self._chunks = []

    def _leave(self, job: SimulatedRequest) -> None:
        hashes = job.queued_request.routing.hashes or ()
        self.cache.end(hashes, job.blocks - len(hashes), job.after)
        self._context -= job.tokens + job.answer - 1
        self._beginning -= job.known_tokens
        self._answers -= job.answer_blocks
        job.made, job.end = job.answer, self.clock.now
        self._done(job)

    def view(self) -> ReplicaView:
        """Create and return a view for another gateway."""
        self.views.append(_View(self) if self.conduct.reports else ReplicaView(**_fields(self)))
        return self.views[-1]

    def mean_step(self) -> float:
        """Return the mean time of a step in seconds, as gateways see it now."""
        if self._idle or self._chunks or self.clock.now < self._since + self._seconds:
            return self._reported.seconds
        return self._reported.after(self._seconds, floor((self.clock.now - self._since) / self._seconds))

    def _tell(self) -> None:
        """Send the state and the changes of the cache to all gateways."""
        waiting = len(self.queue)
        if waiting > self.longest_queue:
            self.longest_queue = waiting
        tokens = 0
        for job in self.queue:
            tokens += job.known_tokens
        for job in self._reading:
            tokens += job.left
        running, free = len(self._running) + len(self._reading), self.cache.free
        for view in self.views if self.conduct.reports else ():
            view.running = running
            view.waiting, view.waiting_tokens = waiting, tokens
            view.free_blocks = free
            view.prefill_rate = self._reported.prefill_rate
            view.in_flight = view.in_flight_tokens = 0
        self._changed(self)
