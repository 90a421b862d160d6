"""All fleets of a gateway: which replicas make up each model, and the clock by which they are looked at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmops.contract import RECONNECT_GRACE_PERIOD
from llmops.gateway.interfaces import Engine, EngineRequest, ModelMetadata
from llmops.gateway.routing.admission.request_queue import create_admission_controller
from llmops.gateway.routing.failover import FailoverReason
from llmops.gateway.routing.model_registry import ModelReplica, first_ready
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex, tenant_cache_salt
from llmops.gateway.routing.placement.unstable_prompts import UnstablePromptDetector
from llmops.gateway.routing.replicas.compatibility import incompatible_replicas, log_incompatible_replicas
from llmops.gateway.routing.replicas.gauge_scraper import SCRAPE_INTERVAL, GaugeScraper
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.routing.replicas.replica_status import describe_replicas
from llmops.gateway.routing.resilient_engine import FailoverEngine
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# how often silence is looked for (s)
HEALTH_CHECK_INTERVAL = 0.25
# What a stream that broke has to go on where it stopped before its answers go on elsewhere (s): as long as a connection
# takes that was only cut, not as long as a server that is started again.
RECONNECT_TIMEOUT = 0.3
# tenants with a series of their own; the rest share one
MAX_TENANT_SERIES, OTHER_TENANTS = 100, "other"


class PoolRegistry:
    """The Team of a catalogue: one Fleet per model, adapters with their base model."""

    def __init__(
        self,
        make: Callable[[str], ReplicaPool],
        outlive: Callable[[ReplicaPool, ModelMetadata], FailoverEngine] | None = None,
        misrouted: Callable[[str], None] = lambda model: None,
        scraper: GaugeScraper | None = None,
        come_back: float = RECONNECT_TIMEOUT,
    ) -> None:
        """`make` gives a model its Fleet, `outlive` has its answers go on elsewhere; `misrouted` is told of a model of
        which another engine answered; `come_back`: seconds that a broken stream has to go on where it stopped."""
        self._make, self._outlive, self._misrouted = make, outlive, misrouted
        self.fleets: dict[str, ReplicaPool] = {}
        self._engines: dict[str, FailoverEngine] = {}
        # those that take part, and those that are one of them under another address
        self._watched: dict[str, dict[str, Replica]] = {}
        # why a replica does not take part, by model and replica
        self.problems: dict[str, dict[str, str]] = {}
        self._scraper, self._come_back = scraper, come_back
        self._watch: list[asyncio.Task] = []

    def join(self, places: Mapping[str, Sequence[ModelReplica[Any]]]) -> Mapping[str, ModelReplica[Any]]:
        if not self._watch:
            loop = asyncio.get_running_loop()
            self._watch = [loop.create_task(work, name="replicas") for work in (self._look(), self._scrape())]
        bases = {name: some for name, some in places.items() if some[0].model.parent is None}
        for name, some in bases.items():
            if name not in self.fleets:
                fleet = self.fleets[name] = self._make(name)
                if self._outlive is not None:
                    self._engines[name] = self._outlive(fleet, some[0].model.card)
            self._update(self.fleets[name], some)
        for name in set(self.fleets) - set(bases):
            fleet = self.fleets.pop(name)
            self._update(fleet, [])
            fleet.end()
            self._engines.pop(name, None)
        return {name: self._joined(some) for name, some in places.items()}

    def told(self) -> dict[str, list[dict[str, Any]]]:
        """What is believed of each replica, by model."""
        problems, watched = self.problems, self._watched
        return {name: describe_replicas(watched[name].values(), problems.get(name, {})) for name in self.fleets}

    def idle(self, server: str) -> bool:
        return not any(one.open_streams for one in self.all() if one.server == server)

    def all(self) -> Iterator[Replica]:
        for replicas in self._watched.values():
            yield from replicas.values()

    async def close(self) -> None:
        for task in self._watch:
            task.cancel()
        await asyncio.gather(*self._watch, return_exceptions=True)
        if self._scraper is not None:
            await self._scraper.close()
        for fleet in self.fleets.values():
            fleet.end()

    def _joined(self, places: Sequence[ModelReplica[Any]]) -> ModelReplica[Any]:
        first = first_ready(places)
        name = first.model.parent or first.model.name
        fleet = self.fleets[name]
        ready = any(view.state in ("ready", "suspect") for view in fleet.views) or first.ready
        return ModelReplica(first.replica, self._model(first.model, self._engines.get(name, fleet), fleet), ready)

    def _model(self, model: GenerativeModel, engine: Engine, fleet: ReplicaPool) -> GenerativeModel:
        """As many at once as all replicas take, and as may wait for them."""
        most = sum(view.max_batch_size for view in fleet.views) or model.card.max_batch_size
        waiting = fleet.admission.gate.bounds.entries if fleet.admission is not None else 0
        return replace(model, engine=engine, card=replace(model.card, max_batch_size=most + waiting))

    def _update(self, fleet: ReplicaPool, places: Sequence[ModelReplica[Any]]) -> None:
        """Replicas whose card changed are new ones. One that is not like the first takes no part."""
        problems = incompatible_replicas(fleet.name, places)
        known, now = self._watched.get(fleet.name, {}), {}
        for place in places:
            if place.replica not in problems:
                replica = known.get(place.replica)
                if replica is None or replica.engine is not place.model.engine:
                    replica = self._begin(fleet, place)
                replica.health.loaded(place.ready)
                now[place.replica] = replica
        for name, replica in known.items():
            if now.get(name) is not replica:
                self._end(fleet, name, replica)
        self._watched[fleet.name] = now
        problems |= _duplicate_addresses(now.values())
        fleet.replicas = {name: replica for name, replica in now.items() if name not in problems}
        for replica in now.values():
            replica.look()
        fleet.changed()
        log_incompatible_replicas(fleet.name, problems, self.problems.get(fleet.name, {}))
        self.problems[fleet.name] = problems

    def _end(self, fleet: ReplicaPool, name: str, replica: Replica) -> None:
        replica.stop()
        fleet.policy.forget(name)
        log.warning("replica %s of %s: gone", name, fleet.name)

    def _begin(self, fleet: ReplicaPool, place: ModelReplica[GenerativeModel]) -> Replica:
        def misrouted() -> None:
            self._misrouted(fleet.name)

        def changed() -> None:
            engine = self._engines.get(fleet.name)
            if engine is not None and replica.view.state == "draining":
                engine.leave(replica.replica_id, "drain")
            fleet.changed()

        def others() -> bool:
            return any(one.view.state == "ready" for name, one in fleet.replicas.items() if name != place.replica)

        replica = Replica(place.replica, place.model, fleet.policy, changed, misrouted, others)
        replica.start(self._come_back)
        return replica

    async def _scrape(self) -> None:
        while self._scraper is not None:
            await self._scraper.look(list(self.all()))
            await asyncio.sleep(SCRAPE_INTERVAL)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_CHECK_INTERVAL)
            for replica in list(self.all()):
                replica.look()


class UnstablePromptReporter:
    """Tells whose prompts change at their beginning, which costs them the prefix cache."""

    def __init__(self, model: str, metrics: GatewayMetrics) -> None:
        self._model, self._watch = model, UnstablePromptDetector()
        self._shares, self._told = metrics.numbers(metric_definitions.UNSTABLE_PROMPTS), set[str]()

    def look(self, tenant: str, ids: bytes) -> None:
        parting = self._watch.look(tenant, ids)
        if parting is None:
            return
        log.warning(
            "%d %% of the prompts of %s for %s are new from token %d on and go on alike after it: what changes there, "
            "such as a date, belongs at the end",
            *(round(100 * parting.share), tenant or "everybody", self._model, parting.token),
        )
        if len(self._told) < MAX_TENANT_SERIES:
            self._told.add(tenant)
        self._shares.labels(tenant if tenant in self._told else OTHER_TENANTS).value = parting.share


def create_pool_registry(settings: GatewaySettings, metrics: GatewayMetrics) -> PoolRegistry | None:
    """None where there is one server and everything goes there at once."""
    gated = bool(settings.tiers) or any(
        one.ttft_p95 is not None for one in (settings.slo, *(settings.slo_of(name) for name in settings.models))
    )
    if not settings.replicas and not gated:
        return None
    misrouted, apart = (
        metrics.numbers(metric_definitions.MISROUTED),
        settings.cache_scope or ("tenant" if settings.store else ""),
    )

    def salt(request: EngineRequest) -> int:
        return tenant_cache_salt(request.caller.partition("/")[0]) if apart == "tenant" else 0

    def count(model: str) -> None:
        misrouted.labels(model).value += 1

    moves = metrics.numbers(metric_definitions.FAILOVERS)
    silence = settings.timeouts.idle / 4

    def outlive(fleet: ReplicaPool, card: ModelMetadata) -> FailoverEngine:
        def moved(reason: FailoverReason) -> None:
            moves.labels(reason).value += 1

        return FailoverEngine(fleet, moved, exact=card.batch_invariant, silence=silence)

    def make(model: str) -> ReplicaPool:
        if not settings.replicas:
            policy = LeastCostPolicy()
            return ReplicaPool(model, policy, salt, create_admission_controller(settings, model, policy))
        policy = LeastCostPolicy(PrefixIndex())
        return ReplicaPool(
            model,
            policy,
            salt,
            create_admission_controller(settings, model, policy),
            UnstablePromptReporter(model, metrics).look,
        )

    return PoolRegistry(
        make,
        outlive,
        count,
        GaugeScraper(settings.metrics_port),
        RECONNECT_TIMEOUT if settings.replicas else RECONNECT_GRACE_PERIOD,
    )


def _duplicate_addresses(replicas: Iterable[Replica]) -> dict[str, str]:
    """Those that are another one under a second address."""
    first: dict[str, str] = {}
    problems = {}
    for replica in replicas:
        same = first.setdefault(replica.instance, replica.replica_id) if replica.instance else replica.replica_id
        if same != replica.replica_id:
            problems[replica.replica_id] = f"it is the replica {same} under another address"
    return problems
