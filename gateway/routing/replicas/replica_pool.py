"""Several replicas as one Engine: a request goes where it is answered soonest, and elsewhere if that fails."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from llmops.contract import LORA_TASK_ID
from llmops.gateway.errors import CancelledStreamError, PreemptedError, UnavailableError
from llmops.gateway.interfaces import (
    Engine,
    EngineRequest,
    QueuedRequest,
    ReplicaView,
    RoutingPolicy,
    RoutingRequest,
    SchedulingParams,
    TokenBatch,
    TokenSink,
    TokenStream,
)
from llmops.gateway.routing.admission.admission_controller import AdmissionController
from llmops.gateway.routing.admission.request_queue import RequestQueue, create_queued_request
from llmops.gateway.routing.cost_model import uncached_tokens
from llmops.gateway.routing.replicas.in_flight import InFlightRequest
from llmops.gateway.routing.replicas.replica import Replica, encode_input_ids, with_cache_salt
from llmops.kv_blocks import adapter_salt

OVERLOADED = "overloaded"
# seconds between two declarations of what waits, and between two answers that are taken back
DEMAND_INTERVAL, PREEMPTION_INTERVAL = 0.1, 0.5
# tokens that an answer is thought to have before there was one, and the share of the newest in their mean
INITIAL_OUTPUT_LENGTH, POOL_OUTPUT_LENGTH_SMOOTHING = 256.0, 0.02


class ReplicaPool(Engine):
    """The replicas of one model. `replicas` may come and go while requests are open."""

    def __init__(
        self,
        name: str,
        policy: RoutingPolicy,
        salt: Callable[[EngineRequest], int] = lambda request: 0,
        gate: AdmissionController | None = None,
        watch: Callable[[str, bytes], None] = lambda tenant, ids: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`salt`: what keeps a request's prefixes apart from others', 0 for nothing. Without a `gate` every request
        goes at once. `watch` is shown each prompt, with whose it is."""
        self.name, self.policy = name, policy
        self.replicas: Mapping[str, Replica] = {}
        self.admission = None if gate is None else RequestQueue(gate, lambda: self.views, clock)
        self._salt, self._watch, self._clock = salt, watch, clock
        self._answer = INITIAL_OUTPUT_LENGTH
        self._declared, self._relieved = (0.0, 0.0), 0.0
        # what runs where, while there is a gate
        self._visits: dict[str, dict[QueuedRequest, ReplicaStream]] = {}

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.admission is not None

    def check(self, turn: SchedulingParams) -> None:
        if self.admission is not None:
            self.admission.check(create_queued_request(turn, RoutingRequest(0)))

    @property
    def views(self) -> Sequence[ReplicaView]:
        return [one.view for one in self.replicas.values()]

    async def open(self, request: EngineRequest) -> TokenStream:
        """Asks each replica until one takes it. Raises UnavailableError when none can, or not in time (`overloaded`).

        An answer that moves is opened again with what it was opened with at first, and the replicas that failed.
        """
        if not request.cache_salt:
            request = with_cache_salt(request, self._salt(request))
        wanted = self._wanted(request)
        if not request.moved:
            self._watch(request.caller.partition("/")[0], wanted.ids)
        while True:
            visit = await self._place(request, wanted)
            try:
                stream = ReplicaStream(await visit.replica.open(request, visit.sent), visit)
            except UnavailableError as error:
                visit.leave(error)
                wanted = replace(wanted, without=wanted.without | {visit.replica.replica_id})
                if all(view.replica_id in wanted.without for view in self.views):
                    raise
            except BaseException:
                visit.leave()
                raise
            else:
                if visit.ticket is not None:
                    self._visits.setdefault(stream.replica, {})[visit.ticket] = stream
                return stream

    async def _place(self, request: EngineRequest, wanted: RoutingRequest) -> RequestLease:
        """A place at a replica, as soon as there is one. Raises UnavailableError."""
        if self.admission is None:
            at = self.policy.choose(wanted, self.views, self._clock())
            if at is None:
                raise UnavailableError(self._nowhere(wanted))
            view, ticket = self.views[at], None
            tokens = uncached_tokens(self.policy, wanted, view)
            self.policy.sent(wanted, view)
        else:
            ticket = create_queued_request(request.turn, wanted, len(wanted.ids), moved=request.moved)
            entering = self.admission.enter(ticket)
            try:
                view = await entering
            finally:
                self._declare()
            tokens = ticket.uncached
        replica = self.replicas.get(view.replica_id)
        if replica is None:
            if ticket is not None and self.admission is not None:
                self.admission.gate.unsent(ticket, view)
            raise UnavailableError(self._nowhere(wanted))
        sent = replica.enter(tokens, is_counted=ticket is not None, prompt=wanted.tokens)
        visit = RequestLease(self, replica, sent, ticket)
        if replica.measured is not None and request.n == 1:
            visit.keeps(wanted)
        return visit

    def ended(self, visit: RequestLease) -> None:
        """An answer is over, or goes on elsewhere."""
        self._answer += POOL_OUTPUT_LENGTH_SMOOTHING * (visit.tokens - self._answer)
        if visit.ticket is not None and self.admission is not None:
            self._visits.get(visit.replica.replica_id, {}).pop(visit.ticket, None)
            self.admission.ended(visit.ticket, visit.tokens)

    def changed(self) -> None:
        """A replica is not as it was."""
        if self.admission is not None:
            self.admission.changed()
            self._declare()
            self._relieve(self.admission.gate)

    def _declare(self) -> None:
        """Tell the engines what waits here, so that other gateways leave room for it; ten times a second at most."""
        assert self.admission is not None
        order, now = self.admission.gate.order, self._clock()
        weights, (last, when) = order.demand(), self._declared
        if weights != last and (now - when >= DEMAND_INTERVAL or not weights):
            self._declared = (weights, now)
            for replica in self.replicas.values():
                replica.declare(order.bytes // 4, weights)

    def _relieve(self, gate: AdmissionController) -> None:
        """Where the KV cache is full, the least urgent answer leaves, to go on when there is room again."""
        now = self._clock()
        if now - self._relieved < PREEMPTION_INTERVAL:
            return
        for view in self.views:
            running = self._visits.get(view.replica_id, {})
            victim = gate.victim(view, running)
            if victim is not None:
                self._relieved = now
                running[victim].preempt()

    def end(self) -> None:
        """Those who wait get UnavailableError."""
        if self.admission is not None:
            self.admission.close()

    def _wanted(self, request: EngineRequest) -> RoutingRequest:
        adapter = int(request.extras.get(LORA_TASK_ID, 0))
        return RoutingRequest(
            len(request.input_ids),
            encode_input_ids(request),
            request.n * min(request.max_tokens, round(self._answer)),
            adapter_salt(request.cache_salt, adapter),
            self._adapter(adapter),
            without=request.without,
        )

    def _adapter(self, adapter: int) -> str:
        cards = [replica.model.card for replica in self.replicas.values()] if adapter else []
        return next((one.name for card in cards for one in card.adapters if one.id == adapter), "")

    def _nowhere(self, wanted: RoutingRequest) -> str:
        if not self.replicas:
            return f"The model {self.name} has no replicas now."
        states = Counter("failed" if one.replica_id in wanted.without else one.state for one in self.views)
        said = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"No replica of the model {self.name} can take the request now ({said}); send it again."


class RequestLease:
    """A request at a replica: counted there until it leaves."""

    __slots__ = ("_answer", "_fleet", "_over", "_wanted", "replica", "sent", "ticket", "tokens")

    def __init__(
        self, fleet: ReplicaPool, replica: Replica, sent: InFlightRequest, ticket: QueuedRequest | None
    ) -> None:
        self.replica, self.sent, self._fleet, self.ticket = replica, sent, fleet, ticket
        self.tokens, self._over = 0, False
        self._wanted: RoutingRequest | None = None
        self._answer = array("i")

    def keeps(self, wanted: RoutingRequest) -> None:
        """Remember the answer, as the replica does not report what it caches."""
        self._wanted = wanted

    def took(self, batch: TokenBatch) -> None:
        """Count a batch of the answer."""
        self.tokens += len(batch.tokens)
        if self.replica.measured is not None and not batch.sequence:
            self.replica.took(self.sent, len(batch.tokens))
            if self._wanted is not None:
                self._answer.extend(batch.tokens)

    def leave(self, error: BaseException | None = None) -> None:
        """May be called again."""
        if self._over:
            return
        self._over = True
        self.replica.ended(self.sent)
        if self._answer and self._wanted is not None:
            self.replica.keep(self._wanted, self._answer.tobytes())
        # a full queue is no fault
        if isinstance(error, UnavailableError) and error.code != OVERLOADED:
            self.replica.failed()
        self._fleet.ended(self)


class ReplicaStream(TokenStream):
    """A request's tokens from the replica where it is."""

    def __init__(self, stream: TokenStream, visit: RequestLease) -> None:
        self._stream, self._visit = stream, visit
        self._sink: TokenSink | None = None
        self._preempted = False

    @property
    def replica(self) -> str:
        return self._visit.replica.replica_id

    @property
    def cached_tokens(self) -> int | None:  # type: ignore[override]
        return self._stream.cached_tokens

    @property
    def ended(self) -> Collection[int]:  # type: ignore[override]
        return self._stream.ended

    async def __anext__(self) -> TokenBatch:
        try:
            batch = await self._stream.__anext__()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._visit.leave(error)
            if self._preempted and isinstance(error, CancelledStreamError):
                raise PreemptedError("The engine's memory is needed for others; send the request again.") from None
            raise
        self._visit.took(batch)
        return batch

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        self._sink = sink
        self._stream.attach(self._take, taken)

    def preempt(self) -> None:
        """Leave the engine; whoever reads has it go on when there is room."""
        self._preempted = True
        self._stream.cancel()

    def cancel(self) -> None:
        self._stream.cancel()
        self._visit.leave()

    def _take(self, batch: TokenBatch) -> bool:
        if self._sink is None or not self._sink(batch):
            return False
        self._visit.took(batch)
        return True
