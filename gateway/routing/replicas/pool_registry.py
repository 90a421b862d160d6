"""The replica pools of all models, with the replicas of each model.

The registry also runs the tasks that keep the replicas' state fresh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmops.background import PeriodicTask
from llmops.contract import RECONNECT_GRACE_PERIOD
from llmops.gateway.interfaces import Engine, EngineRequest, ModelMetadata
from llmops.gateway.routing.admission.request_queue import create_admission_controller
from llmops.gateway.routing.failover import FailoverEngine, FailoverReason
from llmops.gateway.routing.model_registry import ModelReplica, first_ready
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex, tenant_cache_salt
from llmops.gateway.routing.placement.unstable_prompts import UnstablePromptDetector
from llmops.gateway.routing.replicas.compatibility import incompatible_replicas, log_incompatible_replicas
from llmops.gateway.routing.replicas.gauge_scraper import SCRAPE_INTERVAL, GaugeScraper
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.routing.replicas.status import describe_replicas
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

#: Seconds between two checks for silent replicas.
HEALTH_CHECK_INTERVAL = 0.25
#: Seconds that a broken step stream has to reconnect before its answers fail over. Long enough for
#: a connection that was cut, shorter than the restart of a server.
RECONNECT_TIMEOUT = 0.3
#: Tenants with a metric series of their own; the others share one series.
MAX_TENANT_SERIES = 100
#: Label of the series that the other tenants share.
OTHER_TENANTS = "other"
#: Part of the idle timeout without a token after which a stream fails over.
SILENCE_SHARE = 1 / 4


class PoolRegistry:
    """One ReplicaPool per generative model; adapters belong to the pool of their base model."""

    def __init__(
        self,
        create_pool: Callable[[str], ReplicaPool],
        create_engine: Callable[[ReplicaPool, ModelMetadata], FailoverEngine] | None = None,
        on_misrouted: Callable[[str], None] = lambda model: None,
        scraper: GaugeScraper | None = None,
        reconnect_timeout: float = RECONNECT_TIMEOUT,
    ) -> None:
        """Create a registry without models.

        Args:
            create_pool: Returns a new pool for the model of this name.
            create_engine: Wraps a pool in an engine with failover; without it answers end with
                their replica.
            on_misrouted: Called with a model of which another engine answers than its metadata
                announces.
            scraper: Reads the gauges of replicas that do not report their state.
            reconnect_timeout: Seconds that a broken step stream has to reconnect.
        """
        self._create_pool, self._create_engine, self._on_misrouted = create_pool, create_engine, on_misrouted
        self.pools: dict[str, ReplicaPool] = {}
        self._engines: dict[str, FailoverEngine] = {}
        # replicas by model and id, with duplicates of a replica under another address
        self._replicas: dict[str, dict[str, Replica]] = {}
        # why replicas are excluded, by model and replica
        self.problems: dict[str, dict[str, str]] = {}
        self._scraper, self._reconnect_timeout = scraper, reconnect_timeout
        self._tasks: list[PeriodicTask] = []

    async def start(self) -> None:
        """Start the health checks and the scraper."""
        self._tasks = [PeriodicTask("replica health checks", self._check_health, HEALTH_CHECK_INTERVAL)]
        if self._scraper is not None:
            self._tasks.append(PeriodicTask("replica gauges", self._scrape, SCRAPE_INTERVAL))
        for task in self._tasks:
            await task.start()

    async def close(self) -> None:
        for task in self._tasks:
            await task.close()
        if self._scraper is not None:
            await self._scraper.close()
        for pool in self.pools.values():
            pool.shut_down()

    def combine(self, places: Mapping[str, Sequence[ModelReplica[Any]]]) -> Mapping[str, ModelReplica[Any]]:
        bases = {name: replicas for name, replicas in places.items() if replicas[0].model.parent is None}
        for name, replicas in bases.items():
            if name not in self.pools:
                pool = self.pools[name] = self._create_pool(name)
                if self._create_engine is not None:
                    self._engines[name] = self._create_engine(pool, replicas[0].model.card)
            self._update(self.pools[name], replicas)
        for name in set(self.pools) - set(bases):
            pool = self.pools.pop(name)
            self._update(pool, [])
            pool.shut_down()
            self._engines.pop(name, None)
        return {name: self._combine_model(replicas) for name, replicas in places.items()}

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: describe_replicas(self._replicas[name].values(), self.problems.get(name, {})) for name in self.pools
        }

    def is_idle(self, server: str) -> bool:
        return not any(replica.open_streams for replica in self.all() if replica.server == server)

    def all(self) -> Iterator[Replica]:
        """Yield the replicas of all models."""
        for replicas in self._replicas.values():
            yield from replicas.values()

    def _combine_model(self, places: Sequence[ModelReplica[Any]]) -> ModelReplica[Any]:
        """Return one model that stands for all its replicas.

        Its batch is as large as all replicas and the queue together.
        """
        first = first_ready(places)
        name = first.model.parent or first.model.name
        pool = self.pools[name]
        is_ready = any(view.state in ("ready", "suspect") for view in pool.views) or first.ready
        slots = sum(view.max_batch_size for view in pool.views) or first.model.card.max_batch_size
        queued = pool.queue.controller.limits.entries if pool.queue is not None else 0
        engine: Engine = self._engines.get(name, pool)
        card = replace(first.model.card, max_batch_size=slots + queued)
        return ModelReplica(first.replica, replace(first.model, engine=engine, card=card), is_ready)

    def _update(self, pool: ReplicaPool, places: Sequence[ModelReplica[Any]]) -> None:
        """Replace the replicas of a pool. A replica whose metadata changed is a new one."""
        problems = incompatible_replicas(pool.name, places)
        known, current = self._replicas.get(pool.name, {}), {}
        for place in places:
            if place.replica not in problems:
                replica = known.get(place.replica)
                if replica is None or replica.engine is not place.model.engine:
                    replica = self._add_replica(pool, place)
                replica.health.set_loaded(place.ready)
                current[place.replica] = replica
        for name, replica in known.items():
            if current.get(name) is not replica:
                replica.stop()
                pool.policy.forget(name)
                log.warning("replica %s of %s: gone", name, pool.name)
        self._replicas[pool.name] = current
        problems |= _duplicate_addresses(current.values())
        pool.replicas = {name: replica for name, replica in current.items() if name not in problems}
        for replica in current.values():
            replica.update_state()
        pool.update()
        log_incompatible_replicas(pool.name, problems, self.problems.get(pool.name, {}))
        self.problems[pool.name] = problems

    def _add_replica(self, pool: ReplicaPool, place: ModelReplica[GenerativeModel]) -> Replica:
        def on_change() -> None:
            engine = self._engines.get(pool.name)
            if engine is not None and replica.view.state == "draining":
                engine.leave(replica.replica_id, FailoverReason.DRAINING)
            pool.update()

        def has_alternative() -> bool:
            return any(one.view.state == "ready" for name, one in pool.replicas.items() if name != place.replica)

        replica = Replica(
            place.replica,
            place.model,
            pool.policy,
            on_change,
            on_misrouted=lambda: self._on_misrouted(pool.name),
            has_alternative=has_alternative,
        )
        replica.start(self._reconnect_timeout)
        return replica

    async def _scrape(self) -> None:
        if self._scraper is not None:
            await self._scraper.scrape(list(self.all()))

    async def _check_health(self) -> None:
        for replica in list(self.all()):
            replica.update_state()


class UnstablePromptReporter:
    """A reporter that logs and counts tenants whose prompts change at their beginning.

    Such prompts cost the tenant the prefix cache.
    """

    def __init__(self, model: str, metrics: GatewayMetrics) -> None:
        self._model, self._detector = model, UnstablePromptDetector()
        self._ratio, self._tenants = metrics.numbers(metric_definitions.UNSTABLE_PROMPTS), set[str]()

    def record(self, tenant: str, ids: bytes) -> None:
        """Record a prompt of `tenant`; `ids` are its token ids, INT32."""
        divergence = self._detector.record(tenant, ids)
        if divergence is None:
            return
        log.warning(
            "%d %% of the prompts of %s for %s differ from token %d on and are equal again after it. Text that "
            "changes, "
            "such as a date, belongs at the end of the prompt",
            *(round(100 * divergence.share), tenant or "all tenants", self._model, divergence.token),
        )
        if len(self._tenants) < MAX_TENANT_SERIES:
            self._tenants.add(tenant)
        self._ratio.labels(tenant if tenant in self._tenants else OTHER_TENANTS).value = divergence.share


def create_pool_registry(settings: GatewaySettings, metrics: GatewayMetrics) -> PoolRegistry | None:
    """Return the registry, or None for a single server without admission control."""
    objectives = (settings.slo, *(settings.slo_of(name) for name in settings.models))
    if not settings.replicas and not settings.tiers and all(slo.ttft_p95 is None for slo in objectives):
        return None
    misrouted, failovers = metrics.numbers(metric_definitions.MISROUTED), metrics.numbers(metric_definitions.FAILOVERS)
    cache_scope = settings.cache_scope or ("tenant" if settings.store else "")

    def salt(request: EngineRequest) -> int:
        return tenant_cache_salt(request.caller.partition("/")[0]) if cache_scope == "tenant" else 0

    def create_engine(pool: ReplicaPool, card: ModelMetadata) -> FailoverEngine:
        return FailoverEngine(
            pool,
            lambda reason: failovers.labels(reason).inc(),
            exact=card.batch_invariant,
            silence=settings.timeouts.idle * SILENCE_SHARE,
        )

    def create_pool(model: str) -> ReplicaPool:
        policy = LeastCostPolicy(PrefixIndex() if settings.replicas else None)
        controller = create_admission_controller(settings, model, policy)
        if not settings.replicas:
            return ReplicaPool(model, policy, salt, controller)
        return ReplicaPool(model, policy, salt, controller, UnstablePromptReporter(model, metrics).record)

    return PoolRegistry(
        create_pool,
        create_engine,
        on_misrouted=lambda model: misrouted.labels(model).inc(),
        scraper=GaugeScraper(settings.metrics_port),
        reconnect_timeout=RECONNECT_TIMEOUT if settings.replicas else RECONNECT_GRACE_PERIOD,
    )


def _duplicate_addresses(replicas: Iterable[Replica]) -> dict[str, str]:
    """Return the replicas that repeat another replica under a second address.

    Each is mapped to the reason why it is excluded.
    """
    first: dict[str, str] = {}
    problems = {}
    for replica in replicas:
        same = first.setdefault(replica.instance, replica.replica_id) if replica.instance else replica.replica_id
        if same != replica.replica_id:
            problems[replica.replica_id] = f"it is the replica {same} under another address"
    return problems
