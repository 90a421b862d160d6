"""One replica of one model: its state as this gateway knows it, and the connection to its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

from llmops.contract import KV_CLEARED, KV_STORED, LORA_TASK_ID
from llmops.gateway.errors import ApiError, UnavailableError
from llmops.gateway.interfaces import (
    EngineRequest,
    ReplicaState,
    ReplicaView,
    RoutingPolicy,
    RoutingRequest,
    TokenStream,
)
from llmops.gateway.replica_address import server_address
from llmops.gateway.routing.cost_model import ReportedSteps
from llmops.gateway.routing.replicas.health_check import HealthCheck
from llmops.gateway.routing.replicas.in_flight import InFlightRequest, InFlightTracker
from llmops.gateway.routing.replicas.load_estimator import EngineGauges, LoadEstimator
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.triton.engine_observer import EngineIdentity, EngineState
from llmops.gateway.triton.slot_stream import SlotStream
from llmops.gateway.triton.step_stream import StepStreamTransport
from llmops.kv_blocks import block_hashes

log = logging.getLogger(__name__)

#: Units per request weight in which demand is sent to engines, as an integer.
DEMAND_SCALE = 1000
_MAX_INT32 = 2**31 - 1
#: Number of health checks after which an engine that does not answer a request is abandoned. They
#: take as long as SUSPECT_TIMEOUT, and are few while this process is stopped.
MAX_UNANSWERED_CHECKS = 20


class Replica:
    """A replica of a model, which observes its engine and keeps a `ReplicaView` up to date."""

    def __init__(
        self,
        replica_id: str,
        model: GenerativeModel,
        policy: RoutingPolicy,
        on_change: Callable[[], None],
        on_misrouted: Callable[[], None] = lambda: None,
        on_restart: Callable[[], None] = lambda: None,
        has_alternative: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Create a replica that has not reported its state yet.

        Args:
            replica_id: HOST:PORT of the server, and the engine model if the settings name it.
            model: The model on this server.
            policy: The policy that routes to this replica. It is notified of cached blocks.
            on_change: Called when the view has changed.
            on_misrouted: Called when another engine answers than the model's metadata announces.
            on_restart: Called when the engine was restarted.
            has_alternative: Returns True if another replica of the model is ready.
            clock: Monotonic clock in seconds.
        """
        self.replica_id, self.model, self.engine = replica_id, model, model.engine
        self.view = ReplicaView(
            replica_id,
            model.name,
            max_batch_size=model.card.max_batch_size,
            adapters=frozenset(adapter.name for adapter in model.card.adapters),
        )
        self.health = HealthCheck(model.card.state and isinstance(self.engine, StepStreamTransport), clock())
        # `instance` is the reported identity of the engine's process. `problem` is the reason why
        # the replica is excluded, or empty.
        self.instance, self.problem = "", ""
        self.open_streams = 0
        self._policy, self._clock = policy, clock
        self._on_change, self._on_misrouted, self._has_alternative = on_change, on_misrouted, has_alternative
        self._on_restart = on_restart
        self._in_flight = InFlightTracker(self.view)
        # number of running sequences in the engine's last report, and the lowest slot that it omits
        self._reported_running = self._next_slot = 0
        self._steps = ReportedSteps()
        # None for a replica that reports its state
        self.load_estimator = None if self.health.is_reporting else LoadEstimator(self.view, self._in_flight)
        # error that last ended the step stream, if it has been logged
        self._logged_error = ""

    @property
    def server(self) -> str:
        """Return HOST:PORT of the replica's Triton."""
        return server_address(self.replica_id)

    @property
    def engine_model(self) -> str:
        """Return the engine's model name in Triton, or "" if the settings do not name it."""
        return self.replica_id.rpartition("=")[2].partition("/")[2]

    def start(self, reconnect_timeout: float) -> None:
        """Observe the engine.

        A broken step stream has `reconnect_timeout` seconds to recover.
        """
        if self.health.is_reporting and isinstance(self.engine, StepStreamTransport):
            self.engine.watch(self, reconnect_timeout)

    def stop(self) -> None:
        """Stop observing the engine. Open streams continue."""
        if isinstance(self.engine, StepStreamTransport):
            self.engine.unwatch()

    def reserve(self, tokens: int, is_counted: bool, prompt: int = 0) -> InFlightRequest:
        """Take a slot for a request, which is held until `release`.

        Args:
            prompt: Number of prompt tokens.
            tokens: Number of prompt tokens that are not cached.
            is_counted: True if the in-flight counts of the view include the request already.
        """
        self.open_streams += 1
        in_flight = self._in_flight.add(tokens, is_counted, prompt)
        if self.load_estimator is not None:
            self.load_estimator.record_sent(in_flight, self._clock())
        return in_flight

    async def open(self, request: EngineRequest, in_flight: InFlightRequest) -> TokenStream:
        """Open a request that has a slot.

        Raises UnavailableError if the replica cannot be reached.
        """
        adapter = request.extras.get(LORA_TASK_ID, 0)
        if adapter and adapter not in {one.id for one in self.model.card.adapters}:
            raise UnavailableError(f"The replica {self.replica_id} does not have the adapter; try again later.")
        stream = await self.engine.open(request)
        if isinstance(stream, SlotStream):
            in_flight.slot = stream.number
        return stream

    def record_tokens(self, in_flight: InFlightRequest, tokens: int) -> None:
        """Record a message with tokens of a request, if the replica does not report its state."""
        if self.load_estimator is not None and self.load_estimator.record_tokens(in_flight, tokens, self._clock()):
            self._on_change()

    def release(self, in_flight: InFlightRequest) -> None:
        """Release the slot of a request that finished or failed over."""
        self.open_streams -= 1
        self._in_flight.remove(in_flight)
        if self.load_estimator is not None:
            self.load_estimator.record_end(in_flight)
        else:
            self._update_running()

    def update_state(self) -> ReplicaState:
        """Return the current state and publish it in the view.

        The open streams of a replica that stopped responding end once another replica can continue
        them. Until then, they remain open, because the engine may only be slow.
        """
        before = self.view.state
        state = "gone" if self.problem else self.health.update(self._clock())
        if state != before:
            self.view.state = state
            if state == "ready":
                self._logged_error = ""
            if state == "gone" and self.load_estimator is not None:
                self._policy.forget(self.replica_id)
            level = logging.INFO if state in ("ready", "starting") else logging.WARNING
            problem = f" ({self.problem})" if self.problem else ""
            log.log(
                level,
                "Replica %s of %s is now %s, after %s%s",
                self.replica_id,
                self.model.name,
                state,
                before,
                problem,
            )
            self._on_change()
        if state in ("suspect", "gone") and isinstance(self.engine, StepStreamTransport) and self._has_alternative():
            self.engine.abandon(
                UnavailableError(f"Replica {self.replica_id} stopped responding; send the request again.")
            )
        return state

    def check_unanswered(self) -> None:
        """Abandon an engine that sends nothing of a request and reports that no prompt waits."""
        if self.view.waiting_tokens or not isinstance(self.engine, StepStreamTransport):
            return
        stream = self.engine.oldest_unanswered(self._next_slot)
        if stream is not None:
            stream.unanswered_checks += 1
            if stream.unanswered_checks >= MAX_UNANSWERED_CHECKS and self._has_alternative():
                text = f"Replica {self.replica_id} reports that no prompt waits, and sends nothing of a request"
                self.engine.abandon(UnavailableError(f"{text}; send it again."), is_faulty=True)

    def declare_demand(self, tokens: int, demand: float) -> None:
        """Declare to the engine the demand that waits in this gateway.

        The engine reports the sum of all gateways' declarations to every gateway.
        """
        if isinstance(self.engine, StepStreamTransport):
            self.engine.declare_demand(min(tokens, _MAX_INT32), min(round(demand * DEMAND_SCALE), _MAX_INT32))

    def record_failure(self) -> None:
        """Record that a request could not be sent to the replica."""
        self.health.record_failure(self._clock())

    def assume_cached(self, prompt: RoutingRequest, output: bytes) -> None:
        """Assume that a replica that does not report its state has cached a prompt and its answer.

        `output` has the token ids (INT32) of the answer.
        """
        # the last token of an answer is never computed, so its block is not cached
        hashes = block_hashes(prompt.ids + output[:-4], self.view.tokens_per_block, prompt.salt)
        self._policy.stored(self.replica_id, hashes)

    def update_gauges(self, gauges: EngineGauges | None) -> None:
        """Update a replica that does not report its state from its server's gauges.

        `gauges` is None if the gauges cannot be read.
        """
        if self.load_estimator is None:
            return
        if gauges is None:
            self.load_estimator.gauges_unavailable(self._clock())
            return
        self.load_estimator.update_gauges(gauges, self._clock())
        if gauges.blocks:
            self._policy.limit(self.replica_id, gauges.blocks)
        self._on_change()

    # -- notifications of the step stream ----------------------------------------------------------
    def on_state(self, state: EngineState) -> None:
        """Apply the state that the engine reports, unless its numbers contradict each other."""
        self.health.record_report(self._clock(), bool(state.draining))
        if min(state) >= 0 and state.free_blocks <= state.blocks:
            self._next_slot = state.next_slot
            self._in_flight.remove_below(state.next_slot)
            self._apply_state(state)
        self.update_state()
        self._on_change()

    def _apply_state(self, state: EngineState) -> None:
        view = self.view
        self._reported_running = state.running
        view.waiting, view.waiting_tokens = state.waiting, state.waiting_tokens
        self._update_running()
        view.free_blocks, view.blocks = state.free_blocks, state.blocks
        view.tokens_per_block = state.tokens_per_block or view.tokens_per_block
        view.subscribers, view.demand = state.subscribers, state.demand / DEMAND_SCALE
        if state.step_us and (state.running or state.prefill_tokens):
            self._steps.add(state.step_us / 1e6, state.prefill_tokens)
            view.step_seconds, view.prefill_rate = self._steps.seconds, self._steps.prefill_rate

    def _update_running(self) -> None:
        """Set the number of running sequences from the report and from this gateway's own streams.

        The gateway knows its own streams better than the report does: a report precedes the ends of
        its step, and an engine without work sends the next report only after a second.
        """
        started = self.open_streams - len(self._in_flight)
        self.view.running = max(self._reported_running, started - self.view.waiting, 0)

    def on_cache_event(self, kind: int, hashes: Sequence[int]) -> None:
        """Report to the policy the blocks that the engine stored or evicted.

        `kind` is KV_STORED, KV_REMOVED or KV_CLEARED.
        """
        if kind == KV_STORED:
            self._policy.stored(self.replica_id, hashes)
        elif kind == KV_CLEARED:
            self._policy.forget(self.replica_id)
        else:
            self._policy.removed(self.replica_id, hashes)

    def on_identity(self, identity: EngineIdentity) -> None:
        """Record the engine that answers.

        Exclude the replica if the engine is not the one that the replica's metadata announces.
        """
        announced = self.model.card.engine
        if self.instance and identity.instance != self.instance:
            self._on_restart()
        if identity.instance != self.instance:
            # a new process of the engine: problems of the previous process do not apply to it
            self.problem = ""
        self.instance = identity.instance
        self.view.version = identity.version
        if announced and identity.engine and identity.engine != announced:
            self._on_misrouted()
            self.problem = f"it answers with engine {identity.engine[:12]}, and its metadata announces {announced[:12]}"
            self.update_state()

    def take_out(self, problem: str) -> None:
        """Drain the replica's engine, so that no gateway uses the replica until it is restarted."""
        self.problem = problem
        if isinstance(self.engine, StepStreamTransport):
            self.engine.drain()
        self.update_state()

    def on_disconnect(self, error: ApiError) -> None:
        """Record that the step stream ended.

        The stream is opened again, and repeated errors are logged once.
        """
        self._next_slot = 0
        if error.full_message != self._logged_error:
            self._logged_error = error.full_message
            log.info(
                "The stream from replica %s of %s ended and is opened again: %s",
                self.replica_id,
                self.model.name,
                error.full_message,
            )
        self.health.record_disconnect()
        self._policy.forget(self.replica_id)
        self._in_flight.clear()
        self.update_state()

    def silent_seconds(self) -> float | None:
        """Return the seconds since the last report, or None for a replica without reports."""
        return self.health.silent_seconds(self._clock()) if self.health.is_reporting else None
