"""Metrics of replicas by model and state, computed at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmops.gateway.interfaces import ReplicaState, ReplicaView
from llmops.gateway.routing.model_registry import ModelRegistry, ModelReplica
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry
from llmops.gateway.telemetry.metric_definitions import REPLICA_INFO, REPLICAS

REPLICA_STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)


class ReplicaMetricsCollector(Collector):
    """A collector of the replica metrics of all models. Adapters count with their base model."""

    def __init__(self, registry: ModelRegistry, pools: PoolRegistry | None) -> None:
        """Create a collector for `registry`.

        Without `pools`, a replica is `ready` or `gone`, according to its Triton.
        """
        self._registry, self._pools = registry, pools

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(REPLICAS.name, REPLICAS.meaning, labels=REPLICAS.labels)
        info = GaugeMetricFamily(REPLICA_INFO.name, REPLICA_INFO.meaning, labels=REPLICA_INFO.labels)
        for found in self._registry.all():
            if found.model.parent is None:
                count = Counter(self._states(found))
                # export all states, so that a model without a ready replica shows 0
                for state in REPLICA_STATES:
                    family.add_metric([found.model.name, state], count[state])
                for view in self._views(found.model.name):
                    info.add_metric([found.model.name, view.replica_id, view.source], 1)
        yield family
        yield info

    def _views(self, model: str) -> Sequence[ReplicaView]:
        pools = self._pools.pools_of(model) if self._pools is not None else ()
        return [view for pool in pools for view in pool.views]

    def _states(self, found: ModelReplica) -> Iterator[ReplicaState]:
        model = found.model
        if self._pools is not None and self._pools.pools_of(model.name):
            yield from (view.state for view in self._views(model.name))
            return
        for place in self._registry.places(model.name, type(model)):
            yield "ready" if place.ready else "gone"
