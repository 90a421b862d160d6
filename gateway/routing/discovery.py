"""Discovery of replicas: addresses from the settings and from DNS, and a server object for each."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from llmops.background import LogOnce
from llmops.gateway.replica_address import DnsAddress, ReplicaAddress, format_address
from llmops.gateway.routing.model_kinds import ModelKind, SingleModelKind
from llmops.gateway.routing.triton_server import ModelServer

log = logging.getLogger(__name__)

#: Seconds for which an address stays in use after DNS last returned it. Each round-robin answer has
#: a different subset of the addresses, and the health check notices replicas that are gone.
ADDRESS_HOLD_TIME = 30.0
#: Maximum number of addresses of one name. DNS answers that change every second must not open an
#: unlimited number of connections.
MAX_ADDRESSES_PER_NAME = 256
#: Maximum seconds for an answer of DNS, because each refresh of the models waits for the answer.
DNS_TIMEOUT = 3.0

ResolveHost = Callable[[str, int], Awaitable[Sequence[str]]]


class StableAddresses:
    """The addresses of one name.

    New addresses are used at once. Missing addresses stay in use for ADDRESS_HOLD_TIME seconds.
    """

    def __init__(self) -> None:
        self._last_seen: dict[str, float] = {}

    def update(self, addresses: Iterable[str], now: float) -> list[str]:
        """Return the addresses in use after an answer of DNS, sorted.

        An empty answer is ignored.
        """
        answer = list(dict.fromkeys(addresses))
        if answer:
            for address in answer:
                if address in self._last_seen or len(self._last_seen) < MAX_ADDRESSES_PER_NAME:
                    self._last_seen[address] = now
            self._last_seen = {one: seen for one, seen in self._last_seen.items() if now - seen < ADDRESS_HOLD_TIME}
        return sorted(self._last_seen)


class AddressResolver:
    """A resolver that finds the addresses of the settings' replicas and of further replicas.

    Attributes:
        sources: For each address of the last `find`, the entry in the settings it came from.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaAddress | DnsAddress],
        resolve: ResolveHost | None = None,
        further: Callable[[], Sequence[ReplicaAddress | DnsAddress]] = tuple,
        excluded: Callable[[], Collection[ReplicaAddress | DnsAddress]] = tuple,
    ) -> None:
        """Create a resolver.

        Args:
            replicas: The replicas of the settings.
            resolve: Returns the addresses of a host name and port.
            further: Returns further replicas to use.
            excluded: Returns replicas that must not be used at present.
        """
        self.sources: Mapping[str, str] = {}
        self._replicas, self._further, self._excluded = list(replicas), further, excluded
        self._resolve = resolve or resolve_addresses
        self._names: defaultdict[DnsAddress, StableAddresses] = defaultdict(StableAddresses)
        self._log_once = LogOnce()

    async def find(self) -> list[ReplicaAddress]:
        """Return all addresses, each once. If DNS does not answer, its last answer stays in use."""
        excluded = self._excluded()
        replicas = [one for one in dict.fromkeys([*self._replicas, *self._further()]) if one not in excluded]
        found = await asyncio.gather(*map(self._addresses, replicas))
        sources = {address: one for one, addresses in zip(replicas, found, strict=True) for address in addresses}
        self.sources = {format_address(address): format_address(one) for address, one in sources.items()}
        return list(sources)

    async def _addresses(self, replica: ReplicaAddress | DnsAddress) -> list[ReplicaAddress]:
        if isinstance(replica, ReplicaAddress):
            return [replica]
        answer: Sequence[str] = []
        problem = "it has no addresses"
        try:
            async with asyncio.timeout(DNS_TIMEOUT):
                answer = await self._resolve(replica.host, replica.port)
        except (TimeoutError, OSError) as error:
            problem = str(error) or f"no answer within {DNS_TIMEOUT:g} s"
        if self._log_once.is_new(replica, None if answer else "no answer"):
            if answer:
                log.warning("DNS answers for %s again", replica.host)
            else:
                log.warning("DNS has no answer for %s (%s); the last known replicas stay in use", replica.host, problem)
        return [ReplicaAddress(address) for address in self._names[replica].update(answer, time.monotonic())]


class ServerDiscovery:
    """The servers of all replicas. A server object is kept as long as its address is in use."""

    def __init__(self, resolver: AddressResolver, kinds: Sequence[ModelKind[Any]], timeout: float) -> None:
        self._resolver, self._kinds, self._timeout = resolver, kinds, timeout
        self._servers: dict[ReplicaAddress, ModelServer] = {}

    async def __call__(self) -> Sequence[ModelServer]:
        addresses = await self._resolver.find()
        self._servers = {address: self._servers.get(address) or self._create(address) for address in addresses}
        return list(self._servers.values())

    def _create(self, address: ReplicaAddress) -> ModelServer:
        kinds = self._kinds
        if address.engine_model:
            kinds = [SingleModelKind(kind, address.engine_model, address.name) for kind in kinds]
        return ModelServer(address.server, kinds, self._timeout, format_address(address))


async def resolve_addresses(host: str, port: int) -> list[str]:
    """Return HOST:PORT of each address of a name, sorted. Raises OSError."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError as error:
        # reject invalid names without a query: an empty label, or a label of more than 63 letters
        raise socket.gaierror(socket.EAI_NONAME, "the name is not a valid DNS name") from error
    return sorted({f"[{at[0]}]:{port}" if family == socket.AF_INET6 else f"{at[0]}:{port}" for family, *_, at in infos})
