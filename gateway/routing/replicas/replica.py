"""One replica of one model: how it is believed to be, and the way to it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from llmops.gateway.routing.cost_model import PrefillRate
from llmops.gateway.routing.replicas.health_check import HealthCheck
from llmops.gateway.routing.replicas.in_flight import InFlightRequest, InFlightTracker
from llmops.gateway.routing.replicas.load_estimator import EngineGauges, LoadEstimator
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.triton.engine_observer import EngineIdentity, EngineState
from llmops.gateway.triton.slot_stream import SlotStream
from llmops.gateway.triton.step_stream import StepStreamTransport
from llmops.kv_blocks import block_hashes

log = logging.getLogger(__name__)

# the share of the newest step in what is expected of the next
STEP_TIME_SMOOTHING = 0.1
# weights travel as whole numbers of this part
DEMAND_SCALE = 1000


class Replica:
    """A Watcher of its engine. `changed` is called when its view has become another; `misrouted` for each answer that
    is not of the engine that its card announced; `others` says whether another replica is ready."""

    def __init__(
        self,
        replica_id: str,
        model: GenerativeModel,
        policy: RoutingPolicy,
        changed: Callable[[], None],
        misrouted: Callable[[], None] = lambda: None,
        others: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        card = model.card
        self.model, self.engine = model, model.engine
        self.view = ReplicaView(
            replica_id,
            model.name,
            max_batch_size=card.max_batch_size,
            adapters=frozenset(one.name for one in card.adapters),
        )
        self.health = HealthCheck(card.state and isinstance(self.engine, StepStreamTransport), clock())
        # who answers, as it says itself, and what is wrong with that
        self.instance, self.problem = "", ""
        self.open_streams = 0
        self._policy, self._changed, self._misrouted, self._clock = policy, changed, misrouted, clock
        self._others = others
        self._unseen = InFlightTracker(self.view)
        self._prefill_rate = PrefillRate()
        # the estimate of a replica that does not report its state
        self.measured = None if self.health.speaks else LoadEstimator(self.view, self._unseen)
        # why its stream ended, as the log has it since it was last ready
        self._lost_by = ""

    @property
    def replica_id(self) -> str:
        return self.view.replica_id

    @property
    def server(self) -> str:
        """HOST:PORT of its Triton."""
        return server_address(self.replica_id)

    @property
    def engine_model(self) -> str:
        """Triton's name for it, where the settings say it."""
        return self.replica_id.rpartition("=")[2].partition("/")[2]

    def start(self, come_back: float) -> None:
        """`come_back`: seconds that a broken stream has to go on where it stopped."""
        if self.health.speaks and isinstance(self.engine, StepStreamTransport):
            self.engine.watch(self, come_back)

    def stop(self) -> None:
        """It takes part no longer. Its open streams go on."""
        if isinstance(self.engine, StepStreamTransport):
            self.engine.unwatch()

    def enter(self, tokens: int, is_counted: bool, prompt: int = 0) -> InFlightRequest:
        """A request of `prompt` tokens, `tokens` of them uncached, goes there, until `ended`. `is_counted`: the view
        has it already."""
        self.open_streams += 1
        sent = self._unseen.add(tokens, is_counted, prompt)
        if self.measured is not None:
            self.measured.sent(sent, self._clock())
        return sent

    async def open(self, request: EngineRequest, sent: InFlightRequest) -> TokenStream:
        """Raises UnavailableError when it cannot be reached."""
        adapters = {one.id for one in self.model.card.adapters}
        if request.extras.get(LORA_TASK_ID, 0) and request.extras[LORA_TASK_ID] not in adapters:
            raise UnavailableError(f"The replica {self.replica_id} does not have the adapter.")
        stream = await self.engine.open(request)
        if isinstance(stream, SlotStream):
            sent.mark = stream.number
        return stream

    def took(self, sent: InFlightRequest, tokens: int) -> None:
        """Take a message with tokens of a request, on a measured replica."""
        if self.measured is not None and self.measured.token(sent, tokens, self._clock()):
            self._changed()

    def ended(self, sent: InFlightRequest) -> None:
        """The request is over, or goes on elsewhere."""
        self.open_streams -= 1
        self._unseen.remove(sent)
        if self.measured is not None:
            self.measured.ended(sent)

    def look(self) -> ReplicaState:
        """Its state now. Streams that are open where nothing is believed in any more end, to go on elsewhere, once
        there is a place: an engine may only be slow."""
        before = self.view.state
        now = "gone" if self.problem else self.health.look(self._clock())
        if now != before:
            self.view.state = now
            if now == "ready":
                self._lost_by = ""
            if now == "gone" and self.measured is not None:
                self._policy.forget(self.replica_id)
            log.log(
                logging.INFO if now in ("ready", "starting") else logging.WARNING,
                "replica %s of %s: %s, was %s%s",
                *(self.replica_id, self.model.name, now, before, f" ({self.problem})" if self.problem else ""),
            )
            self._changed()
        if now in ("suspect", "gone") and isinstance(self.engine, StepStreamTransport) and self._others():
            self.engine.abandon(UnavailableError(f"The replica {self.replica_id} has fallen silent."))
        return now

    def declare(self, tokens: int, weights: float) -> None:
        """What waits in this gateway, for the engine to tell the others."""
        if isinstance(self.engine, StepStreamTransport):
            self.engine.declare(min(tokens, 2**31 - 1), min(round(weights * DEMAND_SCALE), 2**31 - 1))

    def failed(self) -> None:
        """A request that went there did not get through."""
        self.health.failed(self._clock())

    def keep(self, wanted: RoutingRequest, answer: bytes) -> None:
        """Assume that a measured replica has cached a prompt and the tokens (INT32) of its answer."""
        # the last token of an answer is never computed
        names = block_hashes(wanted.ids + answer[:-4], self.view.tokens_per_block, wanted.salt)
        self._policy.stored(self.replica_id, names)

    def scraped(self, gauges: EngineGauges) -> None:
        """Take the gauges of its server, on a measured replica."""
        if self.measured is None:
            return
        self.measured.gauges(gauges, self._clock())
        if gauges.blocks:
            self._policy.limit(self.replica_id, gauges.blocks)
        self._changed()

    def gauges_unavailable(self) -> None:
        """Its server's gauges could not be read."""
        if self.measured is not None:
            self.measured.no_gauges(self._clock())

    def heard(self, state: EngineState) -> None:
        now = self._clock()
        self.health.heard(now, bool(state.draining))
        if _is_consistent(state):
            self._unseen.seen(state.next_slot)
            self._believe(state)
        self.look()
        self._changed()

    def _believe(self, state: EngineState) -> None:
        view = self.view
        # what one's own streams say is not taken from anybody else
        view.running = max(state.running, self._taken - state.waiting, 0)
        view.waiting, view.waiting_tokens = state.waiting, state.waiting_tokens
        view.free_blocks, view.blocks = state.free_blocks, state.blocks
        view.tokens_per_block = state.tokens_per_block or view.tokens_per_block
        view.subscribers, view.demand = state.subscribers, state.demand / DEMAND_SCALE
        if state.step_us and (state.running or state.prefill_tokens):
            seconds = state.step_us / 1e6
            view.step_seconds += STEP_TIME_SMOOTHING * (seconds - view.step_seconds) if view.step_seconds else seconds
            if state.prefill_tokens:
                view.prefill_rate = self._prefill_rate.add(state.prefill_tokens, seconds)

    @property
    def _taken(self) -> int:
        """Own streams that the engine knows of."""
        return self.open_streams - len(self._unseen)

    def changed(self, kind: int, hashes: Sequence[int]) -> None:
        if kind == KV_STORED:
            self._policy.stored(self.replica_id, hashes)
        elif kind == KV_CLEARED:
            self._policy.forget(self.replica_id)
        else:
            self._policy.removed(self.replica_id, hashes)

    def served(self, who: EngineIdentity) -> None:
        card = self.model.card
        self.instance = who.instance
        self.view.version = who.version
        if card.engine and who.engine and who.engine != card.engine:
            self._misrouted()
            self.problem = f"it answers with engine {who.engine[:12]}, and its card says {card.engine[:12]}"
            self.look()

    def lost(self, error: ApiError) -> None:
        if error.told != self._lost_by:
            # of one that is away the log does not tell each attempt, of which there are some every second
            self._lost_by = error.told
            log.info("the stream from replica %s of %s ended: %s", self.replica_id, self.model.name, error.told)
        self.health.lost()
        self._policy.forget(self.replica_id)
        self._unseen.clear()
        self.look()

    def silent(self) -> float | None:
        """Seconds since it was heard of; None if it never was, or says nothing of itself."""
        return self.health.silent(self._clock()) if self.health.speaks else None


def _is_consistent(state: EngineState) -> bool:
    """Whether an engine can be so; nothing is made of numbers that contradict themselves."""
    return min(state) >= 0 and state.free_blocks <= state.blocks


def encode_input_ids(request: EngineRequest) -> bytes:
    """The prompt as it travels."""
    return array("i", request.input_ids).tobytes()


def with_cache_salt(request: EngineRequest, salt: int) -> EngineRequest:
    return replace(request, cache_salt=salt) if salt else request
