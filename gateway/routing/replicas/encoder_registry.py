"""Encoders on several servers.

Batches are balanced by rows. A batch is sent to a second server if the first does not answer
(hedging).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import ReplicaState
from llmops.gateway.logging_setup import REQUEST_LINES
from llmops.gateway.replica_address import server_address
from llmops.gateway.routing.model_registry import ModelReplica, ReplicaRegistry, first_ready
from llmops.gateway.routing.replicas.compatibility import (
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
    """

    replica: str
    encoder: TritonEncoder
    ready: bool = False
    is_member: bool = True
    rows: int = 0
    last_turn: int = 0
    failed_until: float = 0.0


class EncoderLoadBalancer:
    """A load balancer that sends the batches of a model to its replicas.

    Callers call the balancer in the same way as the client of a single encoder.
    """

    def __init__(self, silence: float) -> None:
        """Create a balancer without replicas.

        A replica that does not answer a batch for `silence` seconds has failed, if another replica
        can answer the batch.
        """
        self.replicas: list[EncoderReplica] = []
        self._silence, self._turns = silence, 0

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
        """Return the answer to a batch, from the first replica that answers.

        Raises:
            UnavailableError: No replica can be reached.
        """
        problem = UnavailableError(
            "No server has the model any longer; GET /v1/models lists the models of this gateway."
        )
        tried: list[EncoderReplica] = []
        while candidates := self._by_load(tried):
            replica, *others = candidates
            tried.append(replica)
            timeout = self._silence if any(other.ready for other in others) else None
            try:
                return await self._send(replica, timeout, request, metadata)
            except (UnavailableError, TimeoutError) as error:
                # a silent server is tried again as rarely as it takes to find that out
                pause = self._silence if isinstance(error, TimeoutError) else 0.0
                replica.failed_until = monotonic() + max(FAILURE_COOLDOWN, pause)
                if isinstance(error, UnavailableError):
                    problem = error
                reason = error.full_message if isinstance(error, UnavailableError) else "it does not answer"
                if (suffix := REQUEST_LINES.suffix(("encoder", replica.replica))) is not None:
                    log.warning("Replica %s failed on a batch of texts: %s%s", replica.replica, reason, suffix)
        raise problem

    def _state(self, replica: EncoderReplica) -> ReplicaState:
        if not replica.ready:
            return "gone"
        return "suspect" if self._is_avoided(replica) else "ready"

    def _is_avoided(self, replica: EncoderReplica) -> bool:
        return not replica.ready or monotonic() < replica.failed_until

    def _by_load(self, excluded: Sequence[EncoderReplica]) -> list[EncoderReplica]:
        """Return the replicas, healthy replicas with few rows first. Equal replicas alternate."""
        candidates = [replica for replica in self.replicas if replica.is_member and replica not in excluded]
        return sorted(candidates, key=lambda one: (self._is_avoided(one), one.rows, one.last_turn))

    async def _send(self, replica: EncoderReplica, timeout: float | None, request: Any, metadata: Sequence[Any]) -> Any:
        """Send a batch.

        The rows count at once, because the next batch is assigned before this batch has been sent.
        """
        rows = request.inputs[0].shape[0]
        self._turns += 1
        replica.last_turn = self._turns
        replica.rows += rows
        try:
            return await asyncio.wait_for(replica.encoder.send(request, *metadata), timeout)
        finally:
            replica.rows -= rows


class EncoderRegistry:
    """The load balancers of all models of one kind of encoder."""

    def __init__(self, queued: int, silence: float) -> None:
        """Create a registry without models.

        Args:
            queued: Maximum number of waiting rows per model.
            silence: Seconds after which a replica that does not answer a batch has failed.
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
        problems = incompatible_replicas(name, places)
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
