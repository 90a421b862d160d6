"""The registry of models on all servers, with one entry per name.

A model on several servers has a single entry, whose engine chooses a server for each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, cast

from llmops.background import PeriodicTask
from llmops.gateway.errors import (
    ModelKindError,
    ModelNotAllowedError,
    ModelNotFoundError,
    UnavailableError,
)
from llmops.gateway.interfaces import Caller
from llmops.gateway.replica_address import parse_replica
from llmops.gateway.routing.discovery import AddressResolver, ServerDiscovery
from llmops.gateway.routing.model_kinds import ModelKind, create_model_kinds
from llmops.gateway.routing.served_models import M, Model, ModelReadiness
from llmops.gateway.routing.triton_server import ModelServer
from llmops.gateway.settings import GatewaySettings

#: Maximum seconds that a readiness check waits for servers, because probes often wait for a second.
READINESS_SECONDS = 0.8


@dataclass(frozen=True, slots=True)
class ModelReplica(Generic[M]):
    """A model on one server, as of the latest refresh."""

    replica: str
    model: M
    ready: bool


def first_ready(places: Sequence[ModelReplica[M]]) -> ModelReplica[M]:
    """Return the first of `places` that is ready, or the first if none is ready.

    The engine of a replica that is not ready explains why.
    """
    return next((place for place in places if place.ready), places[0])


#: A function that is called with the name of a server that is used, and a function that returns
#: whether the server is reachable. None means that the server is no longer used.
ReachabilityCallback = Callable[[str, "Callable[[], bool] | None"], None]


class ReplicaRegistry(Protocol):
    """A registry that combines the replicas of each model into one model for the endpoints."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def combine(self, places: Mapping[str, Sequence[ModelReplica[Any]]]) -> Mapping[str, ModelReplica[Any]]:
        """Return the model to use for each name. `places` has the current replicas by model."""
        ...

    def is_idle(self, server: str) -> bool:
        """Return True if no request is in progress on a server."""
        ...

    def describe(self) -> Mapping[str, Sequence[dict[str, Any]]]:
        """Return the rows of GET /replicas, by model."""
        ...


@dataclass(slots=True)
class ModelEntries:
    """The models of one kind: the replicas of each model, and the replica in use.

    Models without a usable replica are listed with their problems.
    """

    places: dict[str, list[ModelReplica[Any]]] = field(default_factory=dict)
    chosen: dict[str, ModelReplica[Any]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


class ModelRegistry:
    """A registry of all models on the servers, which it watches between `start` and `close`.

    A model remains known while its servers cannot be reached.
    """

    def __init__(
        self,
        servers: Sequence[ModelServer],
        kinds: Sequence[ModelKind[Any]],
        *,
        refresh_seconds: float,
        patience: float,
        find: Callable[[], Awaitable[Sequence[ModelServer]]] | None = None,
        replica_registries: Mapping[type[Model], ReplicaRegistry] = MappingProxyType({}),
        on_server: ReachabilityCallback = lambda server, is_reachable: None,
        aliases: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Create a registry that knows no models yet.

        Args:
            servers: The servers to watch.
            kinds: The kinds of models to recognise.
            refresh_seconds: Seconds between two refreshes.
            patience: Maximum seconds that `start` waits for the first refresh.
            find: Returns the servers to watch from now on, with the same objects for known servers.
                None if the servers never change.
            replica_registries: Combines the replicas of a kind. Without an entry for a kind, the
                first ready replica is used.
            on_server: Called with each server that is used, and again when the server is no longer
                used.
            aliases: Models that each alias stands for, the first choice first.
        """
        self.aliases = aliases
        self._servers, self._kinds, self._patience = list(servers), kinds, patience
        self._find, self._replica_registries, self._on_server = find, replica_registries, on_server
        for server in servers:
            on_server(server.name, partial(_is_reachable, server))
        self._leaving: list[ModelServer] = []
        self._checks: dict[ModelServer, asyncio.Task[bool]] = {}
        self.entries: Mapping[type[Model], ModelEntries] = {kind.model: ModelEntries() for kind in kinds}
        self._refresher = PeriodicTask("refresh of the models", self.refresh, refresh_seconds)

    async def start(self) -> None:
        """Connect, refresh once if the servers answer in time, and keep refreshing until `close`."""
        for server in self._servers:
            server.start()
        for registry in self._replica_registries.values():
            await registry.start()
        await self._refresher.start(self._patience)

    async def close(self) -> None:
        await self._refresher.close()
        for check in list(self._checks.values()):
            check.cancel()
        for registry in self._replica_registries.values():
            await registry.close()
        for server in [*self._servers, *self._leaving]:
            await server.close()

    def of(self, kind: type[M]) -> ModelLookup[M]:
        """Return a lookup of the models of one kind, or of all kinds derived from a base class."""
        return ModelLookup(self, [one.model for one in self._kinds if issubclass(one.model, kind)])

    def places(self, name: str, kind: type[M]) -> Sequence[ModelReplica[M]]:
        """Return the replicas of a model in server order. An unknown model has no replicas."""
        return self.entries[kind].places.get(name, [])

    def all(self) -> list[ModelReplica[Any]]:
        """Return every known model, on the replica in use."""
        return [found for entries in self.entries.values() for found in entries.chosen.values()]

    def problems(self) -> dict[str, str]:
        """Return the models that cannot serve, each with the reason as a sentence for clients."""
        return {name: problem for entries in self.entries.values() for name, problem in entries.broken.items()}

    @property
    def problem(self) -> str | None:
        """Return the reason why no model is known, or None if at least one server answers."""
        problems = [server.problem for server in self._servers] or ["No replica is known yet; try again later."]
        return None if None in problems else next(iter(problems), None)

    def describe_replicas(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of GET /replicas, by model."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for registry in self._replica_registries.values():
            for name, some in registry.describe().items():
                rows.setdefault(name, []).extend(some)
        return dict(sorted(rows.items()))

    def unreachable_servers(self) -> dict[str, str]:
        """Return the servers that did not answer the latest refresh, each with the reason."""
        return {server.name: server.problem for server in self._servers if server.problem is not None}

    async def check_readiness(self) -> ModelReadiness:
        """Refresh, and return which models can serve.

        Servers that take longer than READINESS_SECONDS count with their previous state.
        """
        await self._update_servers()
        checks = [self._check_soon(server) for server in self._servers]
        done = (await asyncio.wait(checks, timeout=READINESS_SECONDS))[0] if checks else ()
        if not any(not check.cancelled() and check.exception() is None and check.result() for check in done):
            return ModelReadiness(problem="Triton is not ready; try again later.")
        self._collect()
        ready = [found.model.name for found in self.all() if found.ready]
        return ModelReadiness(ready, self.problems(), self.problem)

    def _check_soon(self, server: ModelServer) -> asyncio.Task[bool]:
        """Return the running check of a server, or start a check."""
        check = self._checks.get(server)
        if check is None:
            check = self._checks[server] = asyncio.create_task(self._check(server))
            check.add_done_callback(lambda _: self._checks.pop(server, None))
        return check

    async def _check(self, server: ModelServer) -> bool:
        answers = await server.answers()
        await self._refresh_server(server)
        return answers

    def refresh_soon(self) -> None:
        """Refresh without waiting for the next interval."""
        self._refresher.call_soon()

    async def refresh(self) -> None:
        """Read the models of all servers.

        A change at one server is visible at once, however long other servers take. Without a
        change, the models are combined only once for all servers, because combining takes longer
        the more servers exist.
        """
        await self._update_servers()
        await asyncio.gather(*(self._refresh_server(server) for server in self._servers))
        self._collect()

    async def _update_servers(self) -> None:
        """Connect new servers. Close servers that left once their last answer has ended."""
        if self._find is None:
            return
        servers = await self._find()
        for server in servers:
            if server not in self._servers:
                server.start()
                self._on_server(server.name, partial(_is_reachable, server))
        # servers that left at an earlier refresh, to which no requests have been sent since
        for server in [server for server in self._leaving if self._is_idle(server)]:
            self._leaving.remove(server)
            await server.close()
        gone = [server for server in self._servers if server not in servers]
        for server in gone:
            self._on_server(server.name, None)
        self._leaving += gone
        self._servers = list(servers)

    def _is_idle(self, server: ModelServer) -> bool:
        return all(registry.is_idle(server.address) for registry in self._replica_registries.values())

    async def _refresh_server(self, server: ModelServer) -> None:
        if await server.refresh():
            self._collect()

    def _collect(self) -> None:
        self.entries = {kind.model: self._collect_entries(kind) for kind in self._kinds}

    def _collect_entries(self, kind: ModelKind[Any]) -> ModelEntries:
        entries = ModelEntries()
        for place in self._replicas_of_kind(kind):
            entries.places.setdefault(place.model.name, []).append(place)
        registry = self._replica_registries.get(kind.model)
        if registry is not None:
            entries.chosen = dict(registry.combine(entries.places))
        else:
            entries.chosen = {name: first_ready(places) for name, places in entries.places.items()}
        for server in self._servers:
            for offer, problem in server.problems().items():
                found = entries.chosen.get(offer.name)
                if offer.kind.model is kind.model and not (found is not None and found.ready):
                    entries.broken.setdefault(offer.name, problem)
        return entries

    def _replicas_of_kind(self, kind: ModelKind[Any]) -> Iterator[ModelReplica[Any]]:
        for server in self._servers:
            for offer, base in server.models.items():
                if offer.kind.model is kind.model:
                    ready = server.is_ready(offer)
                    yield from (ModelReplica(server.name, model, ready) for model in base.variants())


class ModelLookup(Generic[M]):
    """The models that an endpoint can use."""

    def __init__(self, registry: ModelRegistry, kinds: Sequence[type[M]]) -> None:
        self._registry, self._kinds = registry, kinds

    def candidates(self, name: str, caller: Caller) -> Sequence[str]:
        """Return the models that `name` stands for, the first choice first.

        These are the models of an alias, or only `name` if it is not an alias.

        Raises:
            ModelNotAllowedError: The caller may use neither the alias nor any of its models.
        """
        names: Sequence[str] = self._registry.aliases.get(name, (name,))
        if caller.models is None:
            return names
        allowed = [one for one in names if caller.may_use(name) or caller.may_use(one)]
        if not allowed:
            raise ModelNotAllowedError(name)
        return allowed

    def find(self, name: str) -> M:
        """Return the model with this name, which must not be an alias.

        Raises:
            ModelNotFoundError: No model has this name.
            ModelKindError: The model is of another kind.
            UnavailableError: The model cannot serve, or Triton cannot be reached and no model is
                known.
        """
        registry = self._registry
        for kind in self._kinds:
            found = registry.entries[kind].chosen.get(name)
            if found is not None:
                return cast(M, found.model)
        for kind in self._kinds:
            if name in registry.entries[kind].broken:
                raise UnavailableError(registry.entries[kind].broken[name])
        if registry.problem is not None or not registry.all():
            raise UnavailableError(registry.problem or "Triton serves no model yet; try again later.")
        if any(name in entries.chosen for entries in registry.entries.values()):
            raise ModelKindError(name)
        raise ModelNotFoundError(name)

    def is_ready(self, name: str) -> bool:
        """Return True if the model with this name can serve now."""
        entries = self._registry.entries
        return any((found := entries[kind].chosen.get(name)) is not None and found.ready for kind in self._kinds)

    def get(self, name: str, caller: Caller) -> M:
        """Return the model with this name, or the first served model of an alias.

        Raises:
            ModelNotAllowedError: The caller may not use the name, whether it exists or not.
            ModelNotFoundError: No model has this name.
            UnavailableError: The model cannot serve, or Triton cannot be reached and no model is
                known.
        """
        *others, last = self.candidates(name, caller)
        for one in others:
            with suppress(UnavailableError, ModelNotFoundError):
                return self.find(one)
        return self.find(last)


def _is_reachable(server: ModelServer) -> bool:
    return server.problem is None


def create_model_registry(
    settings: GatewaySettings,
    addresses: Sequence[str],
    replica_registries: Mapping[type[Model], ReplicaRegistry] = MappingProxyType({}),
    on_server: ReachabilityCallback = lambda server, is_reachable: None,
    resolver: AddressResolver | None = None,
) -> ModelRegistry:
    """Return the registry of all models on the servers of `settings.replicas`.

    If the settings name no replicas, the servers at `addresses` are used. A `resolver` replaces the
    default resolver, which knows only the settings.
    """
    kinds, timeout = create_model_kinds(settings), settings.timeouts.connect
    resolver = resolver or AddressResolver([parse_replica(one) for one in settings.replicas])
    discovery = ServerDiscovery(resolver, kinds, timeout)
    return ModelRegistry(
        [] if settings.replicas else [ModelServer(address, kinds, timeout) for address in addresses],
        kinds,
        refresh_seconds=settings.refresh,
        patience=timeout,
        find=discovery if settings.replicas else None,
        replica_registries=replica_registries,
        on_server=on_server,
        aliases=settings.local_aliases,
    )
