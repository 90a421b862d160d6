"""Where the replicas are now: those of the settings, and what DNS says, calmed down."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from llmops.clocks import wait_with_timeout
from llmops.gateway.replica_address import DnsAddress, ReplicaAddress, format_address
from llmops.gateway.routing.model_kinds import ModelKind, SingleModelKind
from llmops.gateway.routing.triton_server import ModelServer

log = logging.getLogger(__name__)

# An address that DNS names no longer stays for so long (s): round-robin answers are a different part each time, and a
# replica that has really gone says so itself.
ADDRESS_HOLD_TIME = 30.0
# addresses of one name; an answer that changes each second would otherwise become any number of connections
MAX_ADDRESSES_PER_NAME = 256
# what an answer of DNS may take (s)
DNS_TIMEOUT = 3.0

ResolveHost = Callable[[str, int], Awaitable[Sequence[str]]]


class StableAddresses:
    """The addresses of one name, sorted: new ones at once, old ones until they have been missing for ADDRESS_HOLD_TIME seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def answered(self, addresses: Iterable[str], now: float) -> list[str]:
        """All that count after this answer. An empty answer says nothing."""
        new = list(dict.fromkeys(addresses))
        if new:
            for address in new:
                if address in self._seen or len(self._seen) < MAX_ADDRESSES_PER_NAME:
                    self._seen[address] = now
            self._seen = {address: seen for address, seen in self._seen.items() if now - seen < ADDRESS_HOLD_TIME}
        return sorted(self._seen)


class AddressResolver:
    """`find` says where the replicas are: each address once, however often it is named."""

    def __init__(self, given: Sequence[ReplicaAddress | DnsAddress], resolve: ResolveHost | None = None) -> None:
        self._given = list(dict.fromkeys(given))
        self._resolve = resolve or resolve_addresses
        self._names = {one: StableAddresses() for one in self._given if isinstance(one, DnsAddress)}
        self._silent: set[DnsAddress] = set()

    async def find(self) -> list[ReplicaAddress]:
        """Never fails: while DNS does not answer, what it said last counts."""
        answers = await asyncio.gather(*map(self._ask, self._given))
        return list(dict.fromkeys(address for some in answers for address in some))

    async def _ask(self, one: ReplicaAddress | DnsAddress) -> list[ReplicaAddress]:
        if isinstance(one, ReplicaAddress):
            return [one]
        try:
            found = await wait_with_timeout(DNS_TIMEOUT, self._resolve(one.host, one.port))
            why = "it has no addresses"
        except (TimeoutError, OSError) as error:
            found, why = [], str(error) or f"no answer within {DNS_TIMEOUT:g} s"
        self._tell(one, None if found else why)
        return [ReplicaAddress(address) for address in self._names[one].answered(found, time.monotonic())]

    def _tell(self, name: DnsAddress, problem: str | None) -> None:
        """Once when it begins, once when it is over."""
        if problem is not None and name not in self._silent:
            log.warning("DNS has no answer for %s (%s); the last known replicas stay in use", name.host, problem)
        if problem is None and name in self._silent:
            log.warning("DNS answers for %s again", name.host)
        (self._silent.discard if problem is None else self._silent.add)(name)


class ServerDiscovery:
    """The servers of `places`, each made once."""

    def __init__(self, places: AddressResolver, kinds: Sequence[ModelKind[Any]], timeout: float) -> None:
        self._places, self._kinds, self._timeout = places, kinds, timeout
        self._servers: dict[ReplicaAddress, ModelServer] = {}

    async def __call__(self) -> Sequence[ModelServer]:
        addresses = await self._places.find()
        self._servers = {one: self._servers.get(one) or self._make(one) for one in addresses}
        return list(self._servers.values())

    def _make(self, one: ReplicaAddress) -> ModelServer:
        kinds = (
            [SingleModelKind(kind, one.engine_model, one.name) for kind in self._kinds]
            if one.engine_model
            else self._kinds
        )
        return ModelServer(one.server, kinds, self._timeout, format_address(one))


async def resolve_addresses(host: str, port: int) -> list[str]:
    """HOST:PORT of each address of a name, sorted. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({f"[{at[0]}]:{port}" if family == socket.AF_INET6 else f"{at[0]}:{port}" for family, *_, at in infos})
