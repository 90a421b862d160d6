"""The replicas of one model as an Engine, which sends each request to the best replica."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from xxhash import xxh3_64_intdigest

from llmops.contract import LORA_TASK_ID
from llmops.gateway.errors import OVERLOADED, CancelledStreamError, PreemptedError, ProtocolError, UnavailableError
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
from llmops.gateway.routing.replicas.replica import Replica
from llmops.kv_blocks import adapter_salt

#: Minimum seconds between two declarations of demand, which bounds the messages to the engines.
DEMAND_INTERVAL = 0.1
#: Minimum seconds between two preemptions, because the first must free its blocks before a second
#: request is chosen.
PREEMPTION_INTERVAL = 0.5
#: Output tokens that are expected of a request before any answer has ended.
INITIAL_OUTPUT_LENGTH = 256.0
#: Weight of the newest answer in the mean output length, which covers about the last 50 answers.
POOL_OUTPUT_LENGTH_SMOOTHING = 0.02


class ReplicaPool(Engine):
    """The replicas of one model. `replicas` may change while requests are open."""

    def __init__(
        self,
        name: str,
        policy: RoutingPolicy,
        controller: AdmissionController | None = None,
        on_prompt: Callable[[str, bytes], None] = lambda tenant, ids: None,
        clock: Callable[[], float] = perf_counter,
        version: str = "",
    ) -> None:
        """Create a pool without replicas.

        Args:
            name: Name of the model.
            policy: Chooses a replica for each request.
            controller: Admission control. Without it, requests are sent at once.
            on_prompt: Called with the tenant and the token ids (INT32) of each new prompt.
            clock: Monotonic clock in seconds.
            version: The version of the model, or "" for a model without versions.
        """
        self.name, self.policy, self.version = name, policy, version
        self.replicas: Mapping[str, Replica] = {}
        self.queue = None if controller is None else RequestQueue(controller, lambda: self.views, clock)
        self._on_prompt, self._clock = on_prompt, clock
        self._output_length = INITIAL_OUTPUT_LENGTH
        self._declared_demand, self._declared_at, self._preempted_at = 0.0, 0.0, 0.0
        # running requests by replica, if the pool has admission control
        self._running: dict[str, dict[QueuedRequest, ReplicaStream]] = {}

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.queue is not None

    def check(self, turn: SchedulingParams) -> None:
        if self.queue is not None:
            self.queue.check(create_queued_request(turn, RoutingRequest(0)))

    def has_waiting(self, turn: SchedulingParams) -> bool:
        return self.queue is not None and self.queue.controller.queue.has_waiting(turn.tenant)

    @property
    def saturation(self) -> float:
        """Return the saturation of the queue, or 0 without a queue."""
        return 0.0 if self.queue is None else self.queue.controller.saturation(self.views)

    @property
    def views(self) -> Sequence[ReplicaView]:
        return [replica.view for replica in self.replicas.values()]

    async def open(self, request: EngineRequest) -> TokenStream:
        """Open a request on the best replica, or on the next best replica that can be reached.

        For a request that failed over, the replicas that failed are excluded.

        Raises:
            UnavailableError: No replica can take the request.
            OverloadedError: No replica can take the request in time.
        """
        routing = self._routing_request(request)
        if not request.moved:
            self._on_prompt(request.caller.partition("/")[0], routing.ids)
        while True:
            stream = await self._assign(request, routing)
            try:
                await stream.start(request)
            except UnavailableError as error:
                stream.release(error)
                routing = replace(routing, without=routing.without | {stream.replica})
                if all(view.replica_id in routing.without for view in self.views):
                    raise
            except BaseException:
                stream.release()
                raise
            else:
                if stream.queued_request is not None:
                    self._running.setdefault(stream.replica, {})[stream.queued_request] = stream
                return stream

    async def _assign(self, request: EngineRequest, routing: RoutingRequest) -> ReplicaStream:
        """Wait for a slot of a replica, and return a stream that holds the slot.

        Raises:
            UnavailableError: No replica can take the request.
        """
        queued_request = None
        if self.queue is None:
            at = self.policy.choose(routing, self.views)
            if at is None:
                raise UnavailableError(self._no_replica_message(routing))
            view = self.views[at]
            tokens = uncached_tokens(self.policy, routing, view)
            self.policy.sent(routing, view)
        else:
            queued_request = create_queued_request(request.turn, routing, len(routing.ids), moved=request.moved)
            waiting = self.queue.enter(queued_request)
            try:
                view = await waiting
            finally:
                self._declare_demand()
            tokens = queued_request.uncached_tokens
        replica = self.replicas.get(view.replica_id)
        if replica is None:
            if queued_request is not None and self.queue is not None:
                self.queue.controller.undo_dispatch(queued_request, view)
            raise UnavailableError(self._no_replica_message(routing))
        in_flight = replica.reserve(tokens, is_counted=queued_request is not None, prompt=routing.tokens)
        cached_prompt = routing if replica.load_estimator is not None and request.n == 1 else None
        return ReplicaStream(self, replica, in_flight, queued_request, cached_prompt)

    def finish(self, stream: ReplicaStream) -> None:
        """Record that a request finished or failed over, and release its slot."""
        self._output_length += POOL_OUTPUT_LENGTH_SMOOTHING * (stream.tokens - self._output_length)
        if stream.queued_request is not None and self.queue is not None:
            self._running.get(stream.replica, {}).pop(stream.queued_request, None)
            self.queue.finish(stream.queued_request, stream.tokens)

    def update(self) -> None:
        """Dispatch waiting requests, declare the demand to the engines, and preempt requests.

        Called after the state of a replica has changed.
        """
        if self.queue is not None:
            self.queue.update()
            self._declare_demand()
            self._preempt(self.queue.controller)

    def _declare_demand(self) -> None:
        """Declare the waiting requests to the engines, so that other gateways leave them room."""
        assert self.queue is not None
        waiting, now = self.queue.controller.queue, self._clock()
        demand = waiting.demand()
        if demand != self._declared_demand and (now - self._declared_at >= DEMAND_INTERVAL or not demand):
            self._declared_demand, self._declared_at = demand, now
            for replica in self.replicas.values():
                replica.declare_demand(waiting.bytes // 4, demand)

    def _preempt(self, controller: AdmissionController) -> None:
        """Preempt the least urgent request on each replica whose KV cache is full.

        The pool preempts at most once per PREEMPTION_INTERVAL.
        """
        now = self._clock()
        if now - self._preempted_at < PREEMPTION_INTERVAL:
            return
        for view in self.views:
            running = self._running.get(view.replica_id, {})
            victim = controller.victim(view, running)
            if victim is not None:
                self._preempted_at = now
                running[victim].preempt()

    def shut_down(self) -> None:
        """Fail the waiting requests with UnavailableError."""
        if self.queue is not None:
            self.queue.close()

    def _routing_request(self, request: EngineRequest) -> RoutingRequest:
        adapter = int(request.extras.get(LORA_TASK_ID, 0))
        salt = adapter_salt(request.cache_salt, adapter)
        return RoutingRequest(
            tokens=len(request.input_ids),
            ids=array("i", request.input_ids).tobytes(),
            answer=request.n * min(request.max_tokens, round(self._output_length)),
            salt=salt,
            adapter=self._adapter_name(adapter) if adapter else "",
            without=request.without,
            affinity=_affinity(request.cache_key, salt) if request.cache_key else None,
        )

    def _adapter_name(self, adapter_id: int) -> str:
        adapters = (one for replica in self.replicas.values() for one in replica.model.card.adapters)
        return next((adapter.name for adapter in adapters if adapter.id == adapter_id), "")

    def _no_replica_message(self, routing: RoutingRequest) -> str:
        if not self.replicas:
            return f"The model {self.name} has no replicas now; send the request again later."
        states = Counter("failed" if view.replica_id in routing.without else view.state for view in self.views)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"No replica of the model {self.name} can take the request now ({counts}); send it again."


def _affinity(cache_key: str, salt: int) -> int:
    # JSON can contain unpaired surrogates, which cannot be encoded as UTF-8
    return xxh3_64_intdigest(cache_key.encode("utf-8", "surrogatepass"), salt)


class ReplicaStream(TokenStream):
    """A request on one replica, which holds a slot until the request ends."""

    _stream: TokenStream

    def __init__(
        self,
        pool: ReplicaPool,
        replica: Replica,
        in_flight: InFlightRequest,
        queued_request: QueuedRequest | None,
        cached_prompt: RoutingRequest | None,
    ) -> None:
        """Create a stream that holds a slot. Call `start` to send the request.

        Args:
            pool: The pool to notify when the slot is released.
            replica: The replica to which the slot belongs.
            in_flight: The request in the replica's in-flight counts.
            queued_request: The request in the charges of admission control, if the pool has
                admission control.
            cached_prompt: The prompt to record as cached together with its answer, for a replica
                that does not report its cache.
        """
        self.queued_request, self.tokens = queued_request, 0
        self._pool, self._replica, self._in_flight = pool, replica, in_flight
        self.replica = replica.replica_id
        self._cached_prompt, self._output = cached_prompt, array("i")
        self._sink: TokenSink | None = None
        self._preempted = self._released = False

    async def start(self, request: EngineRequest) -> None:
        """Send the request to the replica. Raises UnavailableError if it cannot be reached."""
        self._stream = await self._replica.open(request, self._in_flight)

    @property
    def version(self) -> str:  # type: ignore[override]
        return self._pool.version

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
            self.release(error)
            if self._preempted and isinstance(error, CancelledStreamError):
                raise PreemptedError(
                    "The engine's memory is needed for other requests; send the request again."
                ) from None
            raise
        self._record(batch)
        return batch

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        self._sink = sink
        self._stream.attach(self._take, taken)

    def preempt(self) -> None:
        """Remove the request from the engine.

        The reader gets PreemptedError, and may continue the request when a replica has room.
        """
        self._preempted = True
        self._stream.cancel()

    def cancel(self) -> None:
        self._stream.cancel()
        self.release()

    def release(self, error: BaseException | None = None) -> None:
        """Release the slot. May be called more than once.

        `error` is the error that ended the request, if any.
        """
        if self._released:
            return
        self._released = True
        self._replica.release(self._in_flight)
        if self._output and self._cached_prompt is not None:
            self._replica.assume_cached(self._cached_prompt, self._output.tobytes())
        # a full queue does not count as a failure of the replica
        if isinstance(error, (UnavailableError, ProtocolError)) and error.code != OVERLOADED:
            self._replica.record_failure()
        self._pool.finish(self)

    def _take(self, batch: TokenBatch) -> bool:
        if self._sink is None or not self._sink(batch):
            return False
        self._record(batch)
        return True

    def _record(self, batch: TokenBatch) -> None:
        self.tokens += len(batch.tokens)
        if self._replica.load_estimator is not None and not batch.sequence:
            self._replica.record_tokens(self._in_flight, len(batch.tokens))
            if self._cached_prompt is not None:
                self._output.extend(batch.tokens)
