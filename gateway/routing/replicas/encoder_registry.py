"""Encoders on several servers as one: a batch goes where the fewest rows are, and elsewhere where no answer comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import ReplicaState
from llmops.gateway.replica_address import server_address
from llmops.gateway.routing.model_registry import ModelReplica, ReplicaRegistry, first_ready
from llmops.gateway.routing.replicas.compatibility import (
    encoder_differences,
    incompatible_replicas,
    log_incompatible_replicas,
)
from llmops.gateway.routing.replicas.health_check import FAILURE_COOLDOWN
from llmops.gateway.routing.replicas.replica_status import describe_excluded_replica
from llmops.gateway.routing.served_models import CrossEncoder, EmbeddingModel, EncoderModel, Model
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.triton.encoder_client import TritonEncoder

log = logging.getLogger(__name__)

# how often a batch that is not answered yet is asked about (s)
HANG_CHECK_INTERVAL = 0.25


@dataclass(slots=True, eq=False)
class EncoderReplica:
    """An encoder on one server. `rows` are on their way there; until `failed` others come first; `heard`: when it
    answered last, or was idle; `turn`: which it was of all batches so far; `here`: it is still one of the model's.
    Times are monotonic seconds."""

    replica: str
    encoder: TritonEncoder
    ready: bool = False
    here: bool = True
    rows: int = 0
    turn: int = 0
    failed: float = 0.0
    heard: float = 0.0


class EncoderLoadBalancer:
    """Sends a model's batches, as one encoder's connection does."""

    def __init__(self, silence: float, clock: Callable[[], float] = monotonic) -> None:
        """`silence`: seconds after which one that answers none of what it has is taken to hang."""
        self.seats: list[EncoderReplica] = []
        self._silence, self._clock, self._turns = silence, clock, 0
        self._works: set[asyncio.Future[Any]] = set()

    def update(self, places: Iterable[ModelReplica[EncoderModel]]) -> None:
        """Those that there are now. Others stay as long as something is on its way there."""
        known = {(seat.replica, seat.encoder): seat for seat in self.seats}
        now = []
        for place in places:
            seat = known.pop((place.replica, place.model.encoder), None) or EncoderReplica(
                place.replica, place.model.encoder
            )
            seat.ready = place.ready
            now.append(seat)
        for seat in known.values():
            seat.here = False
        self.seats = [*now, *(seat for seat in known.values() if seat.rows)]

    def told(self) -> list[dict[str, Any]]:
        """Lines of GET /replicas."""
        return [
            {"replica": seat.replica, "state": self._state(seat), "problem": "", "own": seat.rows}
            for seat in self.seats
            if seat.here
        ]

    async def __call__(self, request: Any, *metadata: Any) -> Any:
        """The first answer of the server that gets it and of the one that gets it too when the first has none.

        Raises UnavailableError where a second one cannot be reached either, or there is none.
        """
        first = self._best()
        if first is None:
            raise UnavailableError("The model is on no server any more.")
        works = [self._send(first, request, metadata)]
        try:
            second = await self._second(first, works[0])
            if second is not None:
                works.append(self._send(second, request, metadata))
            # what the other one has stays with it: as long as it answers none of that, it gets no more
            return await _first_answer(works)
        except asyncio.CancelledError:
            for work in works:
                work.cancel()
            raise

    async def _second(self, first: EncoderReplica, work: asyncio.Future[Any]) -> EncoderReplica | None:
        """Who gets a batch too: as soon as `first` cannot be reached, or hangs and another does not. None where there
        is an answer, or nobody."""
        while True:
            await asyncio.wait([work], timeout=HANG_CHECK_INTERVAL)
            second, why = self._best(first), ""
            if work.done():
                error = work.exception()
                if not isinstance(error, UnavailableError):
                    return None
                why = error.told
            elif self._hangs(first) and second is not None and not self._is_passed_over(second):
                why = "it does not answer"
            if second is not None and why:
                log.warning("a batch goes from %s to %s: %s", first.replica, second.replica, why)
            if why:
                return second

    def _state(self, seat: EncoderReplica) -> ReplicaState:
        if not seat.ready:
            return "gone"
        return "suspect" if self._is_passed_over(seat) else "ready"

    def _hangs(self, seat: EncoderReplica) -> bool:
        """Whether an answer of it may never come."""
        return not seat.ready or (seat.rows > 0 and self._clock() - seat.heard > self._silence)

    def _is_passed_over(self, seat: EncoderReplica) -> bool:
        return self._hangs(seat) or self._clock() < seat.failed

    def _best(self, without: EncoderReplica | None = None) -> EncoderReplica | None:
        """Of those that should answer the one with the fewest rows; of equal ones in turn."""
        seats = [seat for seat in self.seats if seat.here and seat is not without]
        return min(seats, key=lambda seat: (self._is_passed_over(seat), seat.rows, seat.turn), default=None)

    def _send(self, seat: EncoderReplica, request: Any, metadata: Sequence[Any]) -> asyncio.Future[Any]:
        """Counted there at once: the next batch is sent before this one has left."""
        rows = request.inputs[0].shape[0]
        self._turns += 1
        seat.turn = self._turns
        if not seat.rows:
            seat.heard = self._clock()
        seat.rows += rows
        work: asyncio.Future[Any] = asyncio.ensure_future(seat.encoder.send(request, *metadata))
        self._works.add(work)
        work.add_done_callback(partial(self._ended, seat, rows))
        return work

    def _ended(self, seat: EncoderReplica, rows: int, work: asyncio.Future[Any]) -> None:
        self._works.discard(work)
        seat.rows -= rows
        if work.cancelled():
            return
        if isinstance(work.exception(), UnavailableError):
            seat.failed = self._clock() + FAILURE_COOLDOWN
        else:
            seat.heard = self._clock()


async def _first_answer(works: Sequence[asyncio.Future[Any]]) -> Any:
    """Raises UnavailableError when all do."""
    left = set(works)
    while True:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for work in done:
            if not left or not isinstance(work.exception(), UnavailableError):
                return work.result()


class EncoderRegistry:
    """The Team of one kind of encoders."""

    def __init__(self, queued: int, silence: float) -> None:
        """`queued`: how many rows may wait for each model; `silence` as in Spread."""
        self._queued, self._silence = queued, silence
        self._spreads: dict[str, EncoderLoadBalancer] = {}
        self._models: dict[str, EncoderModel] = {}
        self._problems: dict[str, Mapping[str, str]] = {}

    def join(self, places: Mapping[str, Sequence[ModelReplica[Any]]]) -> Mapping[str, ModelReplica[Any]]:
        for name in set(self._spreads) - set(places):
            self._spreads[name].update([])
            self._problems.pop(name, None)
        return {name: self._joined(name, some) for name, some in places.items()}

    def idle(self, server: str) -> bool:
        seats = [seat for spread in self._spreads.values() for seat in spread.seats]
        return not any(seat.rows and server_address(seat.replica) == server for seat in seats)

    def told(self) -> dict[str, list[dict[str, Any]]]:
        problems = self._problems
        return {
            name: [
                *self._spreads[name].told(),
                *(describe_excluded_replica(one, why) for one, why in problems[name].items()),
            ]
            for name in problems
        }

    async def close(self) -> None:
        return

    def _joined(self, name: str, places: Sequence[ModelReplica[EncoderModel]]) -> ModelReplica[EncoderModel]:
        problems = incompatible_replicas(name, places, encoder_differences)
        log_incompatible_replicas(name, problems, self._problems.get(name, {}))
        self._problems[name] = problems
        alike = [place for place in places if place.replica not in problems]
        spread = self._spreads.setdefault(name, EncoderLoadBalancer(self._silence))
        spread.update(alike)
        # as many at once as each of them takes
        size = min(place.model.card.max_batch_size for place in alike)
        first = alike[0].model
        card, known = replace(first.card, max_batch_size=size), self._models.get(name)
        if known is None or known.card != card or known.tokenizer is not first.tokenizer:
            encoder = TritonEncoder(spread, "", card, self._queued)
            known = self._models[name] = replace(first, card=card, encoder=encoder)
        known.encoder.resize(sum(place.ready for place in alike))
        return replace(first_ready(alike), model=known)


def create_encoder_registries(settings: GatewaySettings) -> dict[type[Model], ReplicaRegistry]:
    """None where there is one server."""
    kinds = (EmbeddingModel, CrossEncoder) if settings.replicas else ()
    return {kind: EncoderRegistry(settings.limits.queued_inputs, settings.timeouts.idle / 4) for kind in kinds}
