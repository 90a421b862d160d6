"""How many replicas each model has, and in which state: counted when it is scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmops.gateway.interfaces import ReplicaState
from llmops.gateway.routing.model_registry import ModelRegistry, ModelReplica
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.telemetry.metric_definitions import REPLICA_INFO, REPLICAS

REPLICA_STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)


class ReplicaMetricsCollector(Collector):
    """Of the models of a catalogue; adapters are part of their base model."""

    def __init__(self, catalogue: ModelRegistry, fleets: PoolRegistry | None) -> None:
        """Without `fleets` a replica is what its Triton says: ready, or gone."""
        self._catalogue, self._fleets = catalogue, fleets

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(REPLICAS.name, REPLICAS.meaning, labels=REPLICAS.labels)
        info = GaugeMetricFamily(REPLICA_INFO.name, REPLICA_INFO.meaning, labels=REPLICA_INFO.labels)
        for found in self._catalogue.all():
            if found.model.parent is None:
                count = Counter(self._states(found))
                # those without one too: a model without a ready replica is 0, and not no series
                for state in REPLICA_STATES:
                    family.add_metric([found.model.name, state], count[state])
                fleet = self._fleet(found)
                for view in fleet.views if fleet is not None else ():
                    info.add_metric([found.model.name, view.replica_id, view.source], 1)
        yield family
        yield info

    def _fleet(self, found: ModelReplica) -> ReplicaPool | None:
        return self._fleets.fleets.get(found.model.name) if self._fleets is not None else None

    def _states(self, found: ModelReplica) -> Iterator[ReplicaState]:
        model, fleet = found.model, self._fleet(found)
        if fleet is not None:
            yield from (view.state for view in fleet.views)
            return
        for place in self._catalogue.places(model.name, type(model)):
            yield "ready" if place.ready else "gone"
