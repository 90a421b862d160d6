"""The replica pools of all models, with the replicas of each model.

The registry also runs the tasks that keep the replicas' state fresh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from llmops.background import PeriodicTask
from llmops.contract import RECONNECT_GRACE_PERIOD
from llmops.gateway.interfaces import Engine, ModelMetadata
from llmops.gateway.routing.admission.degradation import Degradation
from llmops.gateway.routing.admission.request_queue import create_admission_controller
from llmops.gateway.routing.failover import FailoverEngine, FailoverReason
from llmops.gateway.routing.model_registry import ModelReplica, first_ready
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex
from llmops.gateway.routing.placement.unstable_prompts import UnstablePromptDetector
from llmops.gateway.routing.replicas.compatibility import incompatible_replicas, log_incompatible_replicas
from llmops.gateway.routing.replicas.gauge_scraper import SCRAPE_INTERVAL, GaugeScraper
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.routing.replicas.status import describe_replicas
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metric_series import MetricFamily, ValueSeries
from llmops.gateway.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between two checks for silent replicas. HealthCheck requires several checks a second.
HEALTH_CHECK_INTERVAL = 0.25
#: Seconds that a broken step stream has to reconnect before its answers fail over. Long enough for
#: a connection that was cut, and shorter than the restart of a server.
RECONNECT_TIMEOUT = 0.3
#: Share of the idle timeout after which a stream without a token fails over, so that another
#: replica can answer before the timeout.
SILENCE_SHARE = 1 / 4


class VersionSource:
    """A source of the versions of models. In the base class, no model has versions."""

    def version_of(self, model: str, replica: str) -> str | None:
        """Return the version of a replica.

        The version is "" for a model without versions, and None for a replica that must not be
        used.
        """
        return ""

    def names(self, model: str) -> Sequence[str]:
        """Return the versions in use, the oldest first, or nothing for a model without versions."""
        return ()

    def preferred(self, model: str) -> Sequence[str]:
        """Return the versions in use, the version with the most requests first."""
        return ()


class PoolKey(NamedTuple):
    """A version of a model. `version` is "" for a model without versions."""

    model: str
    version: str = ""


class PoolRegistry:
    """A registry with one ReplicaPool per version of a generative model.

    Adapters belong to the pool of their base model.
    """

    def __init__(
        self,
        create_pool: Callable[[str, str], ReplicaPool],
        create_engine: Callable[[Engine, str, ModelMetadata, Callable[[], Engine | None]], FailoverEngine]
        | None = None,
        on_misrouted: Callable[[str], None] = lambda model: None,
        restarts: MetricFamily[ValueSeries] | None = None,
        scraper: GaugeScraper | None = None,
        reconnect_timeout: float = RECONNECT_TIMEOUT,
        versions: VersionSource | None = None,
        degradation: Degradation | None = None,
    ) -> None:
        """Create a registry without models.

        Args:
            create_pool: Returns a new pool for a name and version of a model.
            create_engine: Adds failover to the engine of a version. Receives a function that
                returns the engine to fall back to. Without `create_engine`, answers end when their
                replica does.
            restarts: Counts the restarts of each model's replicas.
            on_misrouted: Called with a model if another engine answers than the model's metadata
                announces.
            scraper: Reads the gauges of replicas that do not report their state.
            reconnect_timeout: Seconds that a broken step stream has to reconnect.
            versions: The versions of the models' replicas, or None if no model has versions.
            degradation: Receives the saturation of all models several times a second.
        """
        self._degradation = degradation
        self._source = versions or VersionSource()
        # replaces the engine of a version, for rehearsals that inject faults
        self.wrap_engine: Callable[[ReplicaPool], Engine] = lambda pool: pool
        # models by name and version, the oldest version first
        self.versions: dict[str, dict[str, ModelReplica[GenerativeModel]]] = {}
        self._create_pool, self._create_engine, self._on_misrouted = create_pool, create_engine, on_misrouted
        self._restarts = restarts
        # pools by model and version
        self._pools: dict[PoolKey, ReplicaPool] = {}
        self._engines: dict[PoolKey, FailoverEngine] = {}
        # replicas by pool and id, including duplicates of a replica under another address
        self._replicas: dict[PoolKey, dict[str, Replica]] = {}
        # replicas that were removed and still have open answers
        self._left: list[Replica] = []
        # reasons for the exclusion of replicas, by pool and replica
        self._problems: dict[PoolKey, dict[str, str]] = {}
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
        for pool in self._pools.values():
            pool.shut_down()

    @property
    def pools(self) -> Sequence[ReplicaPool]:
        """Return the pools of all versions of all models."""
        return list(self._pools.values())

    def engine_of(self, pool: ReplicaPool) -> Engine:
        """Return the engine through which requests reach a pool."""
        return self._engines.get(PoolKey(pool.name, pool.version), pool)

    def pools_of(self, model: str) -> Sequence[ReplicaPool]:
        """Return the pools of all versions of a model."""
        return [pool for (name, _), pool in self._pools.items() if name == model]

    def combine(self, places: Mapping[str, Sequence[ModelReplica[Any]]]) -> Mapping[str, ModelReplica[Any]]:
        groups: dict[PoolKey, list[ModelReplica[Any]]] = {}
        for name, replicas in places.items():
            for place in replicas:
                version = self._source.version_of(place.model.parent or name, place.replica)
                if version is not None:
                    groups.setdefault(PoolKey(name, version), []).append(place)
        bases = {key: replicas for key, replicas in groups.items() if replicas[0].model.parent is None}
        self._name_first_versions(bases)
        for key, replicas in bases.items():
            if key not in self._pools:
                pool = self._pools[key] = self._create_pool(*key)
                if self._create_engine is not None:
                    fallback = partial(self._find_fallback, key)
                    engine = self.wrap_engine(pool)
                    self._engines[key] = self._create_engine(engine, key.version, replicas[0].model.card, fallback)
            self._update(key, replicas)
        for key in set(self._pools) - set(bases):
            self._update(key, [])
            self._pools.pop(key).shut_down()
            if (retired := self._engines.pop(key, None)) is not None:
                retired.is_retired = True
        found: dict[str, dict[str, ModelReplica[GenerativeModel]]] = {}
        for key, replicas in groups.items():
            found.setdefault(key.model, {})[key.version] = self._combine_model(key, replicas)
        self.versions = {name: self._sorted(models, self._source.names(name)) for name, models in found.items()}
        return {
            name: first_ready(list(self._sorted(models, self._source.preferred(name)).values()))
            for name, models in self.versions.items()
        }

    def _sorted(
        self, models: dict[str, ModelReplica[GenerativeModel]], order: Sequence[str]
    ) -> dict[str, ModelReplica[GenerativeModel]]:
        return {version: models[version] for version in sorted(models, key=order.index if order else None)}

    def _name_first_versions(self, bases: Mapping[PoolKey, object]) -> None:
        """Rename the pool of a model without versions when the model gets its first version.

        The first roll-out of a model thereby keeps its pool with the open answers.
        """
        for key, pool in list(self._pools.items()):
            if not key.version and key not in bases:
                version = self._source.version_of(key.model, next(iter(self._replicas[key]), ""))
                renamed = PoolKey(key.model, version or "")
                if renamed in bases and renamed not in self._pools:
                    pool.version = renamed.version
                    _rename(self._pools, key, renamed)
                    _rename(self._engines, key, renamed)
                    _rename(self._replicas, key, renamed)
                    _rename(self._problems, key, renamed)
                    if renamed in self._engines:
                        self._engines[renamed].version = renamed.version

    def _find_fallback(self, key: PoolKey) -> Engine | None:
        """Return the engine of an older version with a replica and the same token ids, or None."""
        versions = self.versions.get(key.model, {})
        own = versions.get(key.version)
        for version, found in versions.items():
            if version == key.version:
                break
            if own is not None and found.ready and _reads_same_tokens(own.model.card, found.model.card):
                return found.model.engine
        return None

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        rows: dict[str, list[dict[str, Any]]] = {}
        for key in self._pools:
            found = describe_replicas(self._replicas[key].values(), self._problems.get(key, {}))
            for row in found if key.version else ():
                row["version"] = key.version
            rows.setdefault(key.model, []).extend(found)
        return rows

    def is_idle(self, server: str) -> bool:
        return not any(one.open_streams for one in (*self.all(), *self._left) if one.server == server)

    def all(self) -> Iterator[Replica]:
        """Yield the replicas of all models."""
        for replicas in self._replicas.values():
            yield from replicas.values()

    def _combine_model(self, key: PoolKey, places: Sequence[ModelReplica[Any]]) -> ModelReplica[Any]:
        """Return one model that stands for all its replicas.

        The batch size of the model is the sum of all replicas' batches and the queue.
        """
        first = first_ready(places)
        base = key._replace(model=first.model.parent or key.model)
        pool = self._pools[base]
        is_ready = any(view.state in ("ready", "suspect") for view in pool.views) or first.ready
        slots = sum(view.max_batch_size for view in pool.views) or first.model.card.max_batch_size
        queued = pool.queue.controller.limits.entries if pool.queue is not None else 0
        engine: Engine = self._engines.get(base, pool)
        card = replace(first.model.card, max_batch_size=slots + queued)
        model = replace(first.model, engine=engine, card=card, version=key.version)
        return ModelReplica(first.replica, model, is_ready)

    def _update(self, key: PoolKey, places: Sequence[ModelReplica[Any]]) -> None:
        """Replace the replicas of a pool.

        A replica whose metadata changed counts as a new replica.
        """
        pool = self._pools[key]
        problems = incompatible_replicas(pool.name, places)
        known, current = self._replicas.get(key, {}), {}
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
                self._left = [one for one in (*self._left, replica) if one.open_streams]
                pool.policy.forget(name)
                if self._restarts is not None and name not in current:
                    self._restarts.forget(pool.name, name)
                log.warning("Replica %s of %s was removed or replaced, and gets no more requests", name, pool.name)
        self._replicas[key] = current
        problems |= _duplicate_addresses(current.values())
        pool.replicas = {name: replica for name, replica in current.items() if name not in problems}
        for replica in current.values():
            replica.update_state()
        pool.update()
        log_incompatible_replicas(pool.name, problems, self._problems.get(key, {}))
        self._problems[key] = problems

    def _add_replica(self, pool: ReplicaPool, place: ModelReplica[GenerativeModel]) -> Replica:
        def on_change() -> None:
            engine = self._engines.get(PoolKey(pool.name, pool.version))
            if engine is not None and replica.view.state == "draining":
                engine.leave(replica.replica_id, FailoverReason.DRAINING)
            pool.update()

        restarts = self._restarts

        def has_alternative() -> bool:
            return any(one.view.state == "ready" for name, one in pool.replicas.items() if name != place.replica)

        replica = Replica(
            place.replica,
            place.model,
            pool.policy,
            on_change,
            on_misrouted=lambda: self._on_misrouted(pool.name),
            on_restart=restarts.labels(pool.name, place.replica).inc if restarts is not None else lambda: None,
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
            replica.check_unanswered()
        if self._degradation is not None:
            saturation: dict[str, float] = {}
            for (name, _), pool in self._pools.items():
                saturation[name] = max(saturation.get(name, 0.0), pool.saturation)
            self._degradation.update(saturation)


def unstable_prompt_log(model: str) -> Callable[[str, bytes], None]:
    """Return a function that logs tenants whose prompts change at their beginning.

    The function takes a tenant and the token ids of its prompt (INT32).
    """
    detector = UnstablePromptDetector()

    def record(tenant: str, ids: bytes) -> None:
        divergence = detector.record(tenant, ids)
        if divergence is not None:
            log.warning(
                "%d %% of the prompts of %s for the model '%s' differ at token %d and are equal again after it, so the "
                "prefix cache cannot reuse the rest. Move text that changes, such as a date, to the end of the prompt.",
                *(round(100 * divergence.share), f"tenant '{tenant}'" if tenant else "all tenants", model),
                divergence.token,
            )

    return record


def create_pool_registry(
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    versions: VersionSource | None = None,
    degradation: Degradation | None = None,
    on_prompt: Callable[[str, bytes], None] | None = None,
) -> PoolRegistry | None:
    """Return the registry, or None if a single server needs no admission control or quality watch.

    Args:
        settings: The settings of the gateway.
        metrics: The metrics of the gateway.
        versions: The versions of the models' replicas, or None if no model has versions.
        degradation: Receives the saturation of all models several times a second.
        on_prompt: Called with a model and the token ids (INT32) of each of its prompts.
    """
    if not settings.replicas and not settings.queues_requests and settings.quality.interval is None:
        return None
    misrouted, failovers = metrics.numbers(metric_definitions.MISROUTED), metrics.numbers(metric_definitions.FAILOVERS)
    restarts = metrics.numbers(metric_definitions.REPLICA_RESTARTS)

    def create_engine(
        engine: Engine, version: str, card: ModelMetadata, fallback: Callable[[], Engine | None]
    ) -> FailoverEngine:
        return FailoverEngine(
            engine,
            lambda reason: failovers.labels(reason).inc(),
            exact=card.batch_invariant,
            silence=settings.timeouts.idle * SILENCE_SHARE,
            version=version,
            fallback=fallback,
        )

    def create_pool(model: str, version: str) -> ReplicaPool:
        policy = LeastCostPolicy(PrefixIndex() if settings.replicas else None)
        controller = create_admission_controller(settings, model, policy)
        if not settings.replicas:
            return ReplicaPool(model, policy, controller, version=version)
        log_unstable = unstable_prompt_log(model)

        def record(tenant: str, ids: bytes) -> None:
            log_unstable(tenant, ids)
            if on_prompt is not None:
                on_prompt(model, ids)

        return ReplicaPool(model, policy, controller, record, version=version)

    return PoolRegistry(
        create_pool,
        create_engine,
        on_misrouted=lambda model: misrouted.labels(model).inc(),
        restarts=restarts,
        scraper=GaugeScraper(settings.metrics_port),
        reconnect_timeout=RECONNECT_TIMEOUT if settings.replicas else RECONNECT_GRACE_PERIOD,
        versions=versions,
        degradation=degradation,
    )


def _rename(by_key: dict[PoolKey, T], old: PoolKey, new: PoolKey) -> None:
    if old in by_key:
        by_key[new] = by_key.pop(old)


def _reads_same_tokens(one: ModelMetadata, other: ModelMetadata) -> bool:
    """Return True if a prompt of `one` has the same token ids on `other`, and fits there."""
    same = one.tokenizer == other.tokenizer and one.vocab_size == other.vocab_size
    return same and bool(one.tokenizer) and other.max_seq_len >= one.max_seq_len


def _duplicate_addresses(replicas: Iterable[Replica]) -> dict[str, str]:
    """Return the replicas that are other replicas under a second address, each with the reason.

    The returned replicas get no requests.
    """
    first: dict[str, str] = {}
    problems = {}
    for replica in replicas:
        same = first.setdefault(replica.instance, replica.replica_id) if replica.instance else replica.replica_id
        if same != replica.replica_id:
            problems[replica.replica_id] = f"it is the replica {same} under another address"
    return problems
