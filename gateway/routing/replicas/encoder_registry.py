"""Encoders on several servers.

Batches are balanced by rows. A batch is sent to a second server if the first does not answer
(hedging).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import ReplicaState
from llmops.gateway.replica_address import server_address
from llmops.gateway.routing.model_registry import ModelReplica, ReplicaRegistry, first_ready
from llmops.gateway.routing.replicas.compatibility import (
    describe_encoder_differences,
    incompatible_replicas,
    log_incompatible_replicas,
)
from llmops.gateway.routing.replicas.health_check import FAILURE_COOLDOWN
from llmops.gateway.routing.replicas.pool_registry import SILENCE_SHARE
from llmops.gateway.routing.replicas.status import describe_excluded_replica
from llmops.gateway.routing.served_models import CrossEncoder, EmbeddingModel, EncoderModel, Model
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.triton.encoder_client import TritonEncoder

log = logging.getLogger(__name__)

#: Seconds between two checks of a batch without an answer, and thereby the delay with which a
#: hanging replica is noticed.
HANG_CHECK_INTERVAL = 0.25


@dataclass(slots=True, eq=False)
class EncoderReplica:
    """An encoder on one server. Times are in monotonic seconds.

    Attributes:
        replica: Address of the server.
        encoder: Client of the encoder.
        ready: True if Triton reports that the model is ready.
        is_member: False once the replica has left the model. It may still have open batches.
        rows: Number of rows in the open batches.
        last_turn: Number of the latest batch, by which equal replicas alternate.
        failed_until: Time until which other replicas are preferred after a failure.
        last_answer: Time of the latest answer, or of the first open batch after an idle time.
    """

    replica: str
    encoder: TritonEncoder
    ready: bool = False
    is_member: bool = True
    rows: int = 0
    last_turn: int = 0
    failed_until: float = 0.0
    last_answer: float = 0.0


class EncoderLoadBalancer:
    """A load balancer that sends the batches of a model to its replicas.

    Callers call the balancer in the same way as the client of a single encoder.
    """

    def __init__(self, silence: float) -> None:
        """Create a balancer without replicas.

        A replica with open batches that sends no answer for `silence` seconds counts as hanging.
        """
        self.replicas: list[EncoderReplica] = []
        self._silence, self._turns = silence, 0
        self._calls: set[asyncio.Future[Any]] = set()

    def update(self, places: Iterable[ModelReplica[EncoderModel]]) -> None:
        """Replace the replicas. Replicas that left remain as long as they have open batches."""
        known = {(replica.replica, replica.encoder): replica for replica in self.replicas}
        current = []
        for place in places:
            key = (place.replica, place.model.encoder)
            replica = known.pop(key, None) or EncoderReplica(*key)
            replica.ready = place.ready
            current.append(replica)
        for replica in known.values():
            replica.is_member = False
        self.replicas = [*current, *(replica for replica in known.values() if replica.rows)]

    def describe(self) -> list[dict[str, Any]]:
        """Return the rows of GET /replicas."""
        return [
            {"replica": replica.replica, "state": self._state(replica), "problem": "", "own": replica.rows}
            for replica in self.replicas
            if replica.is_member
        ]

    async def __call__(self, request: Any, *metadata: Any) -> Any:
        """Return the first answer to a batch.

        The batch is sent to a second replica if the first replica fails or does not answer.

        Raises:
            UnavailableError: No replica can be reached.
        """
        first = self._best()
        if first is None:
            raise UnavailableError(
                "No server has the model any longer; GET /v1/models lists the models of this gateway."
            )
        calls = [self._send(first, request, metadata)]
        try:
            second = await self._hedge(first, calls[0])
            if second is not None:
                calls.append(self._send(second, request, metadata))
            # do not cancel the first call: a hanging replica gets no further batches until it
            # answers
            return await _first_answer(calls)
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            raise

    async def _hedge(self, first: EncoderReplica, call: asyncio.Future[Any]) -> EncoderReplica | None:
        """Wait for the answer of `first`, and return None when the answer is there.

        If `first` fails or hangs, return a second replica for the batch, or None without another.
        """
        while True:
            await asyncio.wait([call], timeout=HANG_CHECK_INTERVAL)
            second, problem = self._best(first), ""
            if call.done():
                error = call.exception()
                if not isinstance(error, UnavailableError):
                    return None
                problem = error.full_message
            elif self._hangs(first) and second is not None and not self._is_avoided(second):
                problem = "it does not answer"
            if second is not None and problem:
                log.warning("An unanswered batch of %s is sent to %s too: %s", first.replica, second.replica, problem)
            if problem:
                return second

    def _state(self, replica: EncoderReplica) -> ReplicaState:
        if not replica.ready:
            return "gone"
        return "suspect" if self._is_avoided(replica) else "ready"

    def _hangs(self, replica: EncoderReplica) -> bool:
        return not replica.ready or (replica.rows > 0 and monotonic() - replica.last_answer > self._silence)

    def _is_avoided(self, replica: EncoderReplica) -> bool:
        return self._hangs(replica) or monotonic() < replica.failed_until

    def _best(self, excluded: EncoderReplica | None = None) -> EncoderReplica | None:
        """Return the replica with the fewest rows, a healthy replica if there is any.

        Equal replicas alternate. Return None without a replica besides `excluded`.
        """
        candidates = [replica for replica in self.replicas if replica.is_member and replica is not excluded]
        return min(candidates, key=lambda one: (self._is_avoided(one), one.rows, one.last_turn), default=None)

    def _send(self, replica: EncoderReplica, request: Any, metadata: Sequence[Any]) -> asyncio.Future[Any]:
        """Send a batch to a replica, and return the future of its response.

        The rows count at once, because the next batch is assigned before this batch has been sent.
        """
        rows = request.inputs[0].shape[0]
        self._turns += 1
        replica.last_turn = self._turns
        if not replica.rows:
            replica.last_answer = monotonic()
        replica.rows += rows
        call: asyncio.Future[Any] = asyncio.ensure_future(replica.encoder.send(request, *metadata))
        self._calls.add(call)
        call.add_done_callback(partial(self._on_done, replica, rows))
        return call

    def _on_done(self, replica: EncoderReplica, rows: int, call: asyncio.Future[Any]) -> None:
        self._calls.discard(call)
        replica.rows -= rows
        if call.cancelled():
            return
        if isinstance(call.exception(), UnavailableError):
            replica.failed_until = monotonic() + FAILURE_COOLDOWN
        else:
            replica.last_answer = monotonic()


async def _first_answer(calls: Sequence[asyncio.Future[Any]]) -> Any:
    """Return the first result. Raises UnavailableError if all calls raise it."""
    pending = set(calls)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for call in done:
            if not pending or not isinstance(call.exception(), UnavailableError):
                return call.result()


class EncoderRegistry:
    """The load balancers of all models of one kind of encoder."""

    def __init__(self, queued: int, silence: float) -> None:
        """Create a registry without models.

        Args:
            queued: Maximum number of waiting rows per model.
            silence: Seconds without an answer after which a replica with open batches counts as
                hanging.
        """
        self._queued, self._silence = queued, silence
        self._balancers: dict[str, EncoderLoadBalancer] = {}
        self._models: dict[str, EncoderModel] = {}
        self._problems: dict[str, Mapping[str, str]] = {}

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    def combine(self, places: Mapping[str, Sequence[ModelReplica[Any]]]) -> Mapping[str, ModelReplica[Any]]:
        for name in set(self._balancers) - set(places):
            self._balancers[name].update([])
            self._problems.pop(name, None)
        return {name: self._combine_model(name, replicas) for name, replicas in places.items()}

    def is_idle(self, server: str) -> bool:
        replicas = [replica for balancer in self._balancers.values() for replica in balancer.replicas]
        return not any(replica.rows and server_address(replica.replica) == server for replica in replicas)

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: [
                *self._balancers[name].describe(),
                *(describe_excluded_replica(replica, problem) for replica, problem in problems.items()),
            ]
            for name, problems in self._problems.items()
        }

    def _combine_model(self, name: str, places: Sequence[ModelReplica[EncoderModel]]) -> ModelReplica[EncoderModel]:
        """Return one model for its replicas, with the smallest batch size of all replicas."""
        problems = incompatible_replicas(name, places, describe_encoder_differences)
        log_incompatible_replicas(name, problems, self._problems.get(name, {}))
        self._problems[name] = problems
        members = [place for place in places if place.replica not in problems]
        balancer = self._balancers.setdefault(name, EncoderLoadBalancer(self._silence))
        balancer.update(members)
        batch_size = min(place.model.card.max_batch_size for place in members)
        first = members[0].model
        card, model = replace(first.card, max_batch_size=batch_size), self._models.get(name)
        if model is None or model.card != card or model.tokenizer is not first.tokenizer:
            encoder = TritonEncoder(balancer, "", card, self._queued)
            model = self._models[name] = replace(first, card=card, encoder=encoder)
        model.encoder.resize(sum(place.ready for place in members))
        return replace(first_ready(members), model=model)


def create_encoder_registries(settings: GatewaySettings) -> dict[type[Model], ReplicaRegistry]:
    """Return a registry for each kind of encoder, or no registries for a single server."""
    kinds = (EmbeddingModel, CrossEncoder) if settings.replicas else ()
    silence = settings.timeouts.idle * SILENCE_SHARE
    return {kind: EncoderRegistry(settings.limits.queued_inputs, silence) for kind in kinds}
