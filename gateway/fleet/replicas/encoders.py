"""Encoders on several servers as one: a batch goes where the fewest rows are, and elsewhere if that server is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from llmops.gateway.addresses import server_of
from llmops.gateway.errors import UnavailableError
from llmops.gateway.fleet.catalogue import Place, Team, choose
from llmops.gateway.fleet.replicas.alike import encoder_differences, strangers, tell
from llmops.gateway.fleet.replicas.health import FAILED
from llmops.gateway.fleet.serving import CrossEncoder, EmbeddingModel, Encoder, Model
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.triton.encoder import TritonEncoder

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Seat:
    """An encoder on one server. `rows` are on their way there; until `failed` others come first (monotonic seconds);
    `turn`: which it was of all batches so far; `here`: it is still one of the model's."""

    replica: str
    encoder: TritonEncoder
    ready: bool = False
    here: bool = True
    rows: int = 0
    turn: int = 0
    failed: float = 0.0


class Spread:
    """Sends a model's batches, as one encoder's connection does."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.seats: list[Seat] = []
        self._clock, self._turns = clock, 0

    def update(self, places: Iterable[Place[Encoder]]) -> None:
        """Those that there are now. Others stay as long as something is on its way there."""
        known = {(seat.replica, seat.encoder): seat for seat in self.seats}
        now = []
        for place in places:
            seat = known.pop((place.replica, place.model.encoder), None) or Seat(place.replica, place.model.encoder)
            seat.ready = place.ready
            now.append(seat)
        for seat in known.values():
            seat.here = False
        self.seats = [*now, *(seat for seat in known.values() if seat.rows)]

    async def __call__(self, request: Any, *metadata: Any) -> Any:
        """Raises UnavailableError where a second one cannot be reached either, or there is none."""
        first = self._best()
        if first is None:
            raise UnavailableError("The model is on no server any more.")
        try:
            return await self._send(first, request, metadata)
        except UnavailableError as error:
            second = self._best(first)
            if second is None:
                raise
            log.warning("a batch goes from %s to %s: %s", first.replica, second.replica, error.told)
        return await self._send(second, request, metadata)

    def _best(self, without: Seat | None = None) -> Seat | None:
        """Of those that should answer the one with the fewest rows; of equal ones in turn."""
        now = self._clock()
        seats = [seat for seat in self.seats if seat.here and seat is not without]
        return min(seats, key=lambda seat: (not seat.ready or now < seat.failed, seat.rows, seat.turn), default=None)

    async def _send(self, seat: Seat, request: Any, metadata: Sequence[Any]) -> Any:
        rows = request.inputs[0].shape[0]
        self._turns += 1
        seat.turn = self._turns
        seat.rows += rows
        try:
            return await seat.encoder.send(request, *metadata)
        except UnavailableError:
            seat.failed = self._clock() + FAILED
            raise
        finally:
            seat.rows -= rows


class Encoders:
    """The Team of one kind of encoders."""

    def __init__(self, queued: int) -> None:
        """`queued`: how many rows may wait for each model."""
        self._queued = queued
        self._spreads: dict[str, Spread] = {}
        self._models: dict[str, Encoder] = {}
        self._problems: dict[str, Mapping[str, str]] = {}

    def join(self, places: Mapping[str, Sequence[Place[Any]]]) -> Mapping[str, Place[Any]]:
        for name in set(self._spreads) - set(places):
            self._spreads[name].update([])
        return {name: self._joined(name, some) for name, some in places.items()}

    def idle(self, server: str) -> bool:
        seats = [seat for spread in self._spreads.values() for seat in spread.seats]
        return not any(seat.rows and server_of(seat.replica) == server for seat in seats)

    async def close(self) -> None:
        return

    def _joined(self, name: str, places: Sequence[Place[Encoder]]) -> Place[Encoder]:
        problems = strangers(name, places, encoder_differences)
        tell(name, problems, self._problems.get(name, {}))
        self._problems[name] = problems
        alike = [place for place in places if place.replica not in problems]
        spread = self._spreads.setdefault(name, Spread())
        spread.update(alike)
        # as many at once as each of them takes
        size = min(place.model.card.max_batch_size for place in alike)
        first = alike[0].model
        card, known = replace(first.card, max_batch_size=size), self._models.get(name)
        if known is None or known.card != card or known.tokenizer is not first.tokenizer:
            encoder = TritonEncoder(spread, "", card, self._queued)
            known = self._models[name] = replace(first, card=card, encoder=encoder)
        known.encoder.resize(sum(place.ready for place in alike))
        return replace(choose(alike), model=known)


def encoders_of(settings: GatewaySettings) -> dict[type[Model], Team]:
    """None where there is one server."""
    kinds = (EmbeddingModel, CrossEncoder) if settings.replicas else ()
    return {kind: Encoders(settings.limits.queued_inputs) for kind in kinds}
