"""All models on all servers, each under its name, however many servers have it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, cast

from llmops.gateway.errors import (
    ApiError,
    ModelKindError,
    ModelNotAllowedError,
    ModelNotFoundError,
    UnavailableError,
    log_detail,
)
from llmops.gateway.interfaces import Caller
from llmops.gateway.replica_address import parse_replica
from llmops.gateway.routing.discovery import AddressResolver, ServerDiscovery
from llmops.gateway.routing.model_kinds import ModelKind, create_model_kinds
from llmops.gateway.routing.refresher import Refresher
from llmops.gateway.routing.served_models import M, Model, ModelReadiness
from llmops.gateway.routing.triton_server import ModelServer
from llmops.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ModelReplica(Generic[M]):
    """A model on one server, as it was at the last look: what a choice among several is made from."""

    replica: str
    model: M
    ready: bool


def first_ready(places: Sequence[ModelReplica[M]]) -> ModelReplica[M]:
    """The first that is ready; without one, the first, whose engine will say why it is not."""
    return next((place for place in places if place.ready), places[0])


ReachabilityCallback = Callable[[str, "Callable[[], bool] | None"], None]


class ReplicaRegistry(Protocol):
    """What makes one model of those in several places."""

    def join(self, places: Mapping[str, Sequence[ModelReplica[Any]]]) -> Mapping[str, ModelReplica[Any]]:
        """The model to use for each name; `places` are all that there are now."""
        ...

    def idle(self, server: str) -> bool:
        """Whether nothing is open there any more."""
        ...

    def told(self) -> Mapping[str, Sequence[dict[str, Any]]]:
        """What is believed of each place, by model."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _ModelEntries:
    """The models of one kind: all places of each, the one that is used, and what is wrong with those without one."""

    places: dict[str, list[ModelReplica[Any]]] = field(default_factory=dict)
    chosen: dict[str, ModelReplica[Any]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


class ModelRegistry:
    """Watches servers between `start` and `close`. A model stays known while its servers are away."""

    def __init__(
        self,
        servers: Sequence[ModelServer],
        kinds: Sequence[ModelKind[Any]],
        *,
        refresh_seconds: float,
        patience: float,
        find: Callable[[], Awaitable[Sequence[ModelServer]]] | None = None,
        teams: Mapping[type[Model], ReplicaRegistry] = MappingProxyType({}),
        reaches: ReachabilityCallback = lambda server, reached: None,
    ) -> None:
        """`patience`: how long `start` waits for the first look (s). `find`: the servers that there are now, those
        known already as they are; None where they stay. `teams` by the kind of models; without one the first place
        that is ready is used. `reaches` is told of each server that is used, and of those that are no longer."""
        self._servers, self._kinds, self._patience = list(servers), kinds, patience
        self._find, self._teams, self._reaches = find, teams, reaches
        for server in servers:
            reaches(server.name, partial(_is_reachable, server))
        self._leaving: list[ModelServer] = []
        self._shelves: Mapping[type[Model], _ModelEntries] = {kind.model: _ModelEntries() for kind in kinds}
        self._refresher = Refresher("catalogue", self.refresh, refresh_seconds)

    def of(self, kind: type[M]) -> ModelLookup[M]:
        """The models of one kind, or of several with this class in common."""
        return ModelLookup(self, [one.model for one in self._kinds if issubclass(one.model, kind)])

    def find(self, name: str, kinds: Sequence[type[M]]) -> M:
        """The model of one of these kinds, at the place that is used.

        Raises ModelNotFoundError, or UnavailableError for what cannot serve or is not known (Triton is down).
        """
        for kind in kinds:
            found = self._shelves[kind].chosen.get(name)
            if found is not None:
                return cast(M, found.model)
        for kind in kinds:
            if name in self._shelves[kind].broken:
                raise UnavailableError(self._shelves[kind].broken[name])
        if self.problem is not None or not self.all():
            raise UnavailableError(self.problem or "Triton serves no model yet.")
        if any(name in shelf.chosen for shelf in self._shelves.values()):
            raise ModelKindError(name)
        raise ModelNotFoundError(name)

    def places(self, name: str, kind: type[M]) -> Sequence[ModelReplica[M]]:
        """Where a model is, in the order of the servers; empty for one that is not known."""
        return self._shelves[kind].places.get(name, [])

    def all(self) -> list[ModelReplica[Any]]:
        """Every known model at the place that is used."""
        return [found for shelf in self._shelves.values() for found in shelf.chosen.values()]

    def problems(self) -> dict[str, str]:
        """The models that cannot serve, known ones and others, and why, in a sentence for clients."""
        return {name: problem for shelf in self._shelves.values() for name, problem in shelf.broken.items()}

    @property
    def problem(self) -> str | None:
        """What keeps all models from being known; None as long as one server answers."""
        problems = [server.problem for server in self._servers] or ["No replica is known yet."]
        return None if None in problems else next(iter(problems), None)

    def told(self) -> dict[str, list[dict[str, Any]]]:
        """What is believed of each place of the models that have a team, by model."""
        lines: dict[str, list[dict[str, Any]]] = {}
        for team in self._teams.values():
            for name, some in team.told().items():
                lines.setdefault(name, []).extend(some)
        return dict(sorted(lines.items()))

    def unreached(self) -> dict[str, str]:
        """The servers that did not answer at the last look, and why."""
        return {server.name: server.problem for server in self._servers if server.problem is not None}

    async def look(self) -> ModelReadiness:
        """How the servers and their models stand now."""
        if not any(await asyncio.gather(*(server.answers() for server in self._servers))):
            return ModelReadiness(problem="Triton is not ready.")
        await self.refresh()
        ready = {found.model.name: found.model.parent or found.model.name for found in self.all() if found.ready}
        return ModelReadiness(ready, self.problems(), self.problem)

    async def generates(self, name: str, seconds: float) -> str | None:
        """None when the model has just answered within `seconds`; otherwise why it has not."""
        model = next((found.model for found in self.all() if found.model.name == name), None)
        if model is None:
            return f"The model {name} is no longer there."
        try:
            await asyncio.wait_for(model.answer_once(), seconds)
        except TimeoutError:
            return f"The model {name} {model.silent} within {seconds:g} s."
        except ApiError as error:
            log_detail(error, f"model {name}, asked for an answer")
            return f"The model {name} {model.failed}: {error.message}"
        return None

    async def refresh(self) -> None:
        """Look at all servers. What one says counts at once, however long another takes."""
        if self._find is not None:
            await self._renew(await self._find())
        await asyncio.gather(*(self._look_at(server) for server in self._servers))

    async def _renew(self, servers: Sequence[ModelServer]) -> None:
        """Servers that are new are connected; those that went are left when their last answer has ended."""
        for server in servers:
            if server not in self._servers:
                server.start()
                self._reaches(server.name, partial(_is_reachable, server))
        gone = [server for server in self._servers if server not in servers]
        for server in gone:
            self._reaches(server.name, None)
        self._leaving += gone
        self._servers = list(servers)
        for server in [one for one in self._leaving if self._is_idle(one)]:
            self._leaving.remove(server)
            await server.close()

    def _is_idle(self, server: ModelServer) -> bool:
        return all(team.idle(server.address) for team in self._teams.values())

    async def _look_at(self, server: ModelServer) -> None:
        await server.look()
        self._shelves = {kind.model: self._filled(kind) for kind in self._kinds}

    def _filled(self, kind: ModelKind[Any]) -> _ModelEntries:
        shelf = _ModelEntries()
        for view in self._views(kind):
            shelf.places.setdefault(view.model.name, []).append(view)
        team = self._teams.get(kind.model)
        if team is not None:
            shelf.chosen = dict(team.join(shelf.places))
        else:
            shelf.chosen = {name: first_ready(places) for name, places in shelf.places.items()}
        for server in self._servers:
            for offer, problem in server.problems().items():
                found = shelf.chosen.get(offer.name)
                if offer.kind.model is kind.model and not (found is not None and found.ready):
                    shelf.broken.setdefault(offer.name, problem)
        return shelf

    def _views(self, kind: ModelKind[Any]) -> Iterator[ModelReplica[Any]]:
        for server in self._servers:
            for offer, base in server.models.items():
                if offer.kind.model is kind.model:
                    ready = server.is_ready(offer)
                    yield from (ModelReplica(server.name, model, ready) for model in base.variants())

    async def start(self) -> None:
        """Connect, look once if the servers answer in time, and keep the list fresh in the background until `close`."""
        for server in self._servers:
            server.start()
        await self._refresher.start(self._patience)

    async def close(self) -> None:
        await self._refresher.close()
        for team in self._teams.values():
            await team.close()
        for server in [*self._servers, *self._leaving]:
            await server.close()


class ModelLookup(Generic[M]):
    """Where endpoints find the models that they can use."""

    def __init__(self, catalogue: ModelRegistry, kinds: Sequence[type[M]]) -> None:
        self._catalogue, self._kinds = catalogue, kinds

    def get(self, name: str, caller: Caller) -> M:
        """Raises ModelNotFoundError, or UnavailableError for what cannot serve or is not known (Triton is down);
        ModelNotAllowedError for any name that is not among the caller's."""
        if not caller.may_use(name):
            raise ModelNotAllowedError(name)
        return self._catalogue.find(name, self._kinds)


def _is_reachable(server: ModelServer) -> bool:
    return server.problem is None


def create_model_registry(
    settings: GatewaySettings,
    addresses: Sequence[str],
    teams: Mapping[type[Model], ReplicaRegistry] = MappingProxyType({}),
    reaches: ReachabilityCallback = lambda server, reached: None,
) -> ModelRegistry:
    """The catalogue of all kinds of models on these servers, or on those of `settings.replicas`."""
    kinds, patience = create_model_kinds(settings), settings.timeouts.connect
    found = ServerDiscovery(AddressResolver([parse_replica(one) for one in settings.replicas]), kinds, patience)
    return ModelRegistry(
        [] if settings.replicas else [ModelServer(address, kinds, patience) for address in addresses],
        kinds,
        refresh_seconds=settings.refresh,
        patience=patience,
        find=found if settings.replicas else None,
        teams=teams,
        reaches=reaches,
    )
