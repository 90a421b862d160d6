"""All fleets of a gateway: which replicas make up each model, and the clock by which they are looked at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmops.contract import GRACE
from llmops.gateway.fleet.admission.waiting import gate_of
from llmops.gateway.fleet.catalogue import Place, choose
from llmops.gateway.fleet.continued import Reason
from llmops.gateway.fleet.continuing import Continuing
from llmops.gateway.fleet.replicas.alike import strangers, tell
from llmops.gateway.fleet.replicas.beliefs import told
from llmops.gateway.fleet.replicas.fleet import Fleet
from llmops.gateway.fleet.replicas.replica import Replica
from llmops.gateway.fleet.replicas.scraped import PERIOD, Scraper
from llmops.gateway.fleet.routing.choose import Cheapest
from llmops.gateway.fleet.routing.prefix import PrefixIndex, tenant_salt
from llmops.gateway.fleet.routing.stability import StabilityWatch
from llmops.gateway.fleet.serving import ServedModel
from llmops.gateway.messages import Engine, EngineRequest, ModelCard
from llmops.gateway.observability import names
from llmops.gateway.observability.metrics import Metrics
from llmops.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

# how often silence is looked for (s)
LOOK = 0.25
# What a stream that broke has to go on where it stopped before its answers go on elsewhere (s): as long as a connection
# takes that was only cut, not as long as a server that is started again.
COME_BACK = 0.3
# tenants with a series of their own; the rest share one
MOST_TOLD, OTHERS = 100, "other"


class Fleets:
    """The Team of a catalogue: one Fleet per model, adapters with their base model."""

    def __init__(
        self,
        make: Callable[[str], Fleet],
        outlive: Callable[[Fleet, ModelCard], Continuing] | None = None,
        misrouted: Callable[[str], None] = lambda model: None,
        scraper: Scraper | None = None,
        come_back: float = COME_BACK,
    ) -> None:
        """`make` gives a model its Fleet, `outlive` has its answers go on elsewhere; `misrouted` is told of a model of
        which another engine answered; `come_back`: seconds that a broken stream has to go on where it stopped."""
        self._make, self._outlive, self._misrouted = make, outlive, misrouted
        self.fleets: dict[str, Fleet] = {}
        self._engines: dict[str, Continuing] = {}
        # those that take part, and those that are one of them under another address
        self._watched: dict[str, dict[str, Replica]] = {}
        # why a replica does not take part, by model and replica
        self.problems: dict[str, dict[str, str]] = {}
        self._scraper, self._come_back = scraper, come_back
        self._watch: list[asyncio.Task] = []

    def join(self, places: Mapping[str, Sequence[Place[Any]]]) -> Mapping[str, Place[Any]]:
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
        return {name: told(watched[name].values(), problems.get(name, {})) for name in self.fleets}

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

    def _joined(self, places: Sequence[Place[Any]]) -> Place[Any]:
        first = choose(places)
        name = first.model.parent or first.model.name
        fleet = self.fleets[name]
        ready = any(view.state in ("ready", "suspect") for view in fleet.views) or first.ready
        return Place(first.replica, self._model(first.model, self._engines.get(name, fleet), fleet), ready)

    def _model(self, model: ServedModel, engine: Engine, fleet: Fleet) -> ServedModel:
        """As many at once as all replicas take, and as may wait for them."""
        most = sum(view.max_batch_size for view in fleet.views) or model.card.max_batch_size
        waiting = fleet.admission.gate.bounds.entries if fleet.admission is not None else 0
        return replace(model, engine=engine, card=replace(model.card, max_batch_size=most + waiting))

    def _update(self, fleet: Fleet, places: Sequence[Place[Any]]) -> None:
        """Replicas whose card changed are new ones. One that is not like the first takes no part."""
        problems = strangers(fleet.name, places)
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
        problems |= _twins(now.values())
        fleet.replicas = {name: replica for name, replica in now.items() if name not in problems}
        for replica in now.values():
            replica.look()
        fleet.changed()
        tell(fleet.name, problems, self.problems.get(fleet.name, {}))
        self.problems[fleet.name] = problems

    def _end(self, fleet: Fleet, name: str, replica: Replica) -> None:
        replica.stop()
        fleet.policy.forget(name)
        log.warning("replica %s of %s: gone", name, fleet.name)

    def _begin(self, fleet: Fleet, place: Place[ServedModel]) -> Replica:
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
            await asyncio.sleep(PERIOD)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            for replica in list(self.all()):
                replica.look()


class Instability:
    """Tells whose prompts change at their beginning, which costs them the prefix cache."""

    def __init__(self, model: str, metrics: Metrics) -> None:
        self._model, self._watch = model, StabilityWatch()
        self._shares, self._told = metrics.numbers(names.PREFIX_UNSTABLE), set[str]()

    def look(self, tenant: str, ids: bytes) -> None:
        parting = self._watch.look(tenant, ids)
        if parting is None:
            return
        log.warning(
            "%d %% of the prompts of %s for %s are new from token %d on and go on alike after it: what changes there, "
            "such as a date, belongs at the end",
            *(round(100 * parting.share), tenant or "everybody", self._model, parting.token),
        )
        if len(self._told) < MOST_TOLD:
            self._told.add(tenant)
        self._shares.labels(tenant if tenant in self._told else OTHERS).value = parting.share


def fleets_of(settings: GatewaySettings, metrics: Metrics) -> Fleets | None:
    """None where there is one server and everything goes there at once."""
    gated = bool(settings.tiers) or any(
        one.ttft_p95 is not None for one in (settings.slo, *(settings.slo_of(name) for name in settings.models))
    )
    if not settings.replicas and not gated:
        return None
    misrouted, apart = metrics.numbers(names.MISROUTED), settings.cache_scope or ("tenant" if settings.store else "")

    def salt(request: EngineRequest) -> int:
        return tenant_salt(request.caller.partition("/")[0]) if apart == "tenant" else 0

    def count(model: str) -> None:
        misrouted.labels(model).value += 1

    moves = metrics.numbers(names.MIGRATIONS)
    silence = settings.timeouts.idle / 4

    def outlive(fleet: Fleet, card: ModelCard) -> Continuing:
        def moved(reason: Reason) -> None:
            moves.labels(reason).value += 1

        return Continuing(fleet, moved, exact=card.batch_invariant, silence=silence)

    def make(model: str) -> Fleet:
        if not settings.replicas:
            policy = Cheapest()
            return Fleet(model, policy, salt, gate_of(settings, model, policy))
        policy = Cheapest(PrefixIndex())
        return Fleet(model, policy, salt, gate_of(settings, model, policy), Instability(model, metrics).look)

    return Fleets(make, outlive, count, Scraper(settings.metrics_port), COME_BACK if settings.replicas else GRACE)


def _twins(replicas: Iterable[Replica]) -> dict[str, str]:
    """Those that are another one under a second address."""
    first: dict[str, str] = {}
    problems = {}
    for replica in replicas:
        same = first.setdefault(replica.instance, replica.replica_id) if replica.instance else replica.replica_id
        if same != replica.replica_id:
            problems[replica.replica_id] = f"it is the replica {same} under another address"
    return problems
