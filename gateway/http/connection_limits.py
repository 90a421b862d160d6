"""Limits on all connections of a gateway together.

The limits bound the number of connections, and the bytes that wait before or after requests. When
all connections are in use, connections without a complete request are closed to make room for new
ones.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from llmops.gateway.logging_setup import RepeatedLines
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

#: Minimum number of seconds between two log lines with the same reason. Bounds the log, because
#: clients can cause such lines at any rate.
LOG_INTERVAL = 10.0
#: Number of file descriptors reserved for Triton, stores and files. Clients get the rest, so that
#: connections cannot make the gateway fail to open its own files.
RESERVED_DESCRIPTORS = 64
#: Maximum number of bytes that wait behind requests, over all connections. Bounds memory, because a
#: single read of a socket yields up to 256 KiB.
MAX_PIPELINED_BYTES_TOTAL = 16 * 2**20
#: Maximum number of bytes in responses that clients do not read, over all connections. Bounds
#: memory. Only the bytes over 64 KiB of a connection count.
MAX_UNREAD_BYTES_TOTAL = 64 * 2**20
#: Maximum number of bytes in incomplete headers, over all connections. Bounds memory. Only headers
#: of more than 4 KiB count.
MAX_HEADER_BYTES_TOTAL = 16 * 2**20
#: Maximum number of pipelined requests that start in one iteration of the event loop, over all
#: connections. If all of 400 connections started one, new connections and other clients would wait.
PIPELINED_REQUESTS_PER_TURN = 8
#: Divisor of the connection limit that gives the number of connections to close at once. The search
#: for these connections is too expensive to repeat for each of them.
EVICTION_DIVISOR = 64
#: Rank, in the order of eviction, of connections that do not read their response: after the
#: connections whose `progress` is 0, 1 or 2.
UNREAD = 3
#: Rank of connections within a request of a known caller. Another connection is closed in place of
#: one of these.
UPLOAD = 4
#: Seconds after its last change for which a connection is among the last to be closed. Most clients
#: send a request within this time of connecting, so that held connections are closed in place of
#: theirs.
RECENT_SECONDS = 1.0
#: Seconds until the next search after a search that found no connection to close. Bounds the cost
#: of searches while all connections are busy.
EVICTION_RETRY_DELAY = 0.1


class Connection(Protocol):
    """An interface to a connection, for the limits.

    Attributes:
        address: The network of the client, None for a connection that does not count.
        changed: The time at which the connection was opened, a request or a pause between requests
            began, or the client stopped reading, whichever was last.
    """

    address: str | None
    changed: float

    @property
    def progress(self) -> int | None:
        """Return the progress of the connection's next request.

        The number is 0 before the first request, 1 between requests, 2 within a request or while
        its caller is unknown, UPLOAD within a request of a caller with a key, and None during a
        response.
        """

    def evict(self) -> None:
        """Close the connection to make room for another connection."""

    def abort(self) -> None:
        """Close the connection at once and drop everything that its client has not read."""

    def read_pipelined(self) -> None:
        """Parse the bytes that arrived behind the request that has been answered."""


@dataclass(slots=True)
class HeldBytes:
    """The bytes that wait on connections, with a limit on their sum.

    Attributes:
        limit: The maximum number of bytes on all connections together.
        sizes: The number of bytes on each connection.
        total: The number of bytes on all connections.
    """

    limit: int
    sizes: dict[Connection, int] = field(default_factory=dict)
    total: int = 0

    def hold(self, connection: Connection, size: int) -> Sequence[Connection]:
        """Set the number of bytes that wait on a connection.

        Return the connections to drop: none up to the limit, and beyond the limit the connections
        of the addresses that hold the most bytes.
        """
        self.release(connection)
        self.sizes[connection] = size
        self.total += size
        dropped: list[Connection] = []
        if self.total > self.limit:
            # Dropping a quarter at once saves further sorting, which is expensive.
            for worst in _worst_first(self.sizes):
                if self.total <= self.limit * 3 // 4:
                    break
                self.release(worst)
                dropped.append(worst)
        return dropped

    def release(self, connection: Connection) -> None:
        """Remove a connection and its bytes from the sum."""
        self.total -= self.sizes.pop(connection, 0)


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of all connections of a gateway, and the state that is compared with the limits.

    Attributes:
        header_bytes: The maximum size of a request's header.
        connections: The maximum number of connections.
        per_client: The maximum number of connections of an address, 0 for any number.
        header_seconds: The seconds within which a client must send a header.
        client_seconds: The seconds within which a client must read some of its response.
        metrics: The gateway's metrics, which count rejected connections; None to count nothing.
        open: The number of open connections.
        clients: The connections of each address, the oldest first.
        rejecting: The number of connections that are being rejected.
        pipelined: The bytes that wait behind requests.
        unread: The connections whose clients do not read, with the bytes in their buffers.
        unfinished: The bytes of the large headers of incomplete requests.
        descriptors: The maximum number of file descriptors of the process.
    """

    header_bytes: int
    connections: int
    per_client: int
    header_seconds: float
    client_seconds: float
    metrics: GatewayMetrics | None = None
    open: int = 0
    clients: dict[str, dict[Connection, None]] = field(default_factory=dict)
    rejecting: int = 0
    pipelined: HeldBytes = field(default_factory=lambda: HeldBytes(MAX_PIPELINED_BYTES_TOTAL))
    unread: dict[Connection, int] = field(default_factory=dict)
    unfinished: HeldBytes = field(default_factory=lambda: HeldBytes(MAX_HEADER_BYTES_TOTAL))
    descriptors: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _lines: RepeatedLines = field(default_factory=lambda: RepeatedLines(LOG_INTERVAL))
    _next_eviction: float = 0.0
    _evicted: int = 0
    _answered: deque[Connection] = field(default_factory=deque)

    def queue_pipelined(self, connection: Connection) -> None:
        """Queue a connection to continue, in its turn, with the bytes behind its answered request."""
        self._answered.append(connection)
        if len(self._answered) == 1:
            asyncio.get_running_loop().call_soon(self._read_pipelined)

    def _read_pipelined(self) -> None:
        for _ in range(min(PIPELINED_REQUESTS_PER_TURN, len(self._answered))):
            self._answered.popleft().read_pipelined()
        if self._answered:
            asyncio.get_running_loop().call_soon(self._read_pipelined)

    def reason_to_reject(self, descriptor: int, address: str) -> str | None:
        """Return the reason why a new connection cannot be accepted, or None if it can.

        Args:
            descriptor: The number of the connection's file descriptor, which is the lowest free
                number.
            address: The network of the client.
        """
        if self.per_client and len(self.clients.get(address, ())) >= self.per_client:
            return f"{address} has {self.per_client} connections, as many as limits.connections_per_client allows"
        # The descriptors of evicted connections become free in the next iteration of the event loop.
        # Evicted connections may leave low numbers free below a full range of high numbers.
        in_use = max(descriptor, self.open + RESERVED_DESCRIPTORS) - self._evicted
        if in_use >= self.descriptors - RESERVED_DESCRIPTORS and not self._make_room(address):
            return f"the process has nearly all of its {self.descriptors} file descriptors in use; raise `ulimit -n`"
        if self.open >= self.connections and not self._make_room(address):
            return f"{self.connections} connections are open, as many as limits.connections allows"
        return None

    def add(self, address: str, connection: Connection) -> None:
        """Count a new connection of `address`."""
        self.open += 1
        self.clients.setdefault(address, {})[connection] = None

    def remove(self, address: str, connection: Connection) -> None:
        """Stop counting a connection of `address`."""
        self.open -= 1
        same_client = self.clients[address]
        del same_client[connection]
        if not same_client:
            del self.clients[address]

    def hold_pipelined(self, connection: Connection, size: int) -> None:
        """Set the bytes that wait behind a request.

        Beyond the limit, the connections of the addresses that hold the most bytes are dropped.
        """
        for worst in self.pipelined.hold(connection, size):
            self.report(
                "pipeline",
                f"{worst.address} sent too many requests without waiting for responses; its connection was closed.",
            )
            worst.abort()

    def hold_unread(self, connection: Connection, size: int) -> None:
        """Record a connection whose client does not read, and the bytes in its buffer.

        Beyond the limit, the connection with the most bytes of the worst address is dropped.
        """
        self.unread[connection] = size
        if sum(self.unread.values()) <= MAX_UNREAD_BYTES_TOTAL:
            return
        worst = _worst_first(self.unread)[0]
        self.report(
            "unread", f"{worst.address} left {self.unread[worst]} bytes of an answer unread; its connection was closed."
        )
        del self.unread[worst]
        worst.abort()

    def hold_header(self, connection: Connection, size: int) -> None:
        """Set the bytes of the large header of an incomplete request.

        Beyond the limit, the connections of the addresses that hold the most bytes are dropped.
        """
        for worst in self.unfinished.hold(connection, size):
            self.report(
                "header_bytes",
                f"{worst.address} sent a large header and did not complete the request; its connection was closed.",
            )
            worst.abort()

    def report(self, reason: str, message: str) -> None:
        """Count a closed connection and log `message`, at most once per LOG_INTERVAL and reason."""
        if self.metrics is not None:
            self.metrics.refused.labels(reason).inc()
        if (suffix := self._lines.suffix(reason)) is not None:
            log.warning("%s%s", message, suffix)

    def _make_room(self, address: str) -> bool:
        """Close some of the connections without a complete request, or with an unread response.

        Return False if there are no such connections that may be closed for one of `address`.

        Those within a request of a caller with a key come last: a stranger's connections cannot end
        them. Of the others, the connections that have changed in the last RECENT_SECONDS come last,
        and stay open if their address has fewer connections than `address`. Otherwise, those of the
        address with the most connections of these kinds come first, because a client chooses the
        kinds of its own connections. Within an address, the order is: connections that never had a
        request, idle connections, connections whose request is incomplete, and connections that do
        not read a response; and within each kind, those that changed the longest ago.
        """
        if monotonic() < self._next_eviction:
            return False
        evicted = heapq.nsmallest(max(self.connections // EVICTION_DIVISOR, 1), self._evictable(address))
        for *_, connection in evicted:
            connection.evict()
        if evicted:
            self._evicted += len(evicted)
            asyncio.get_running_loop().call_soon(self._forget_evicted, len(evicted))
        else:
            self._next_eviction = monotonic() + EVICTION_RETRY_DELAY
        return bool(evicted)

    def _forget_evicted(self, count: int) -> None:
        self._evicted -= count

    def _evictable(self, address: str) -> Iterator[tuple[bool, bool, int, int, float, int, Connection]]:
        recent, count = monotonic() - RECENT_SECONDS, len(self.clients.get(address, ()))
        # The unique number keeps `nsmallest` from comparing connections, which have no order.
        number = 0
        for same_client in self.clients.values():
            ranks = {one: UNREAD if one in self.unread else one.progress for one in same_client}
            evictable = {one: rank for one, rank in ranks.items() if rank is not None}
            uploads = sum(rank == UPLOAD for rank in evictable.values())
            for connection, rank in evictable.items():
                number += 1
                is_recent, is_upload = connection.changed > recent, rank == UPLOAD
                if not is_recent or len(same_client) >= count:
                    same_kind = uploads if is_upload else len(evictable) - uploads
                    yield is_upload, is_recent, -same_kind, rank, connection.changed, number, connection


def _worst_first(held: Mapping[Connection, int]) -> list[Connection]:
    """Return the connections in the order in which they are to be dropped.

    The connections of the address that holds the most bytes come first, and among them the largest.
    """
    totals: dict[str | None, int] = {}
    for one, size in held.items():
        totals[one.address] = totals.get(one.address, 0) + size
    return sorted(held, key=lambda one: (totals[one.address], held[one]), reverse=True)


def connection_limits(settings: GatewaySettings, metrics: GatewayMetrics | None = None) -> ConnectionLimits:
    """Return the connection limits for `settings`."""
    limits, timeouts = settings.limits, settings.timeouts
    per_client = limits.connections_per_client
    return ConnectionLimits(
        header_bytes=limits.header_bytes,
        connections=limits.connections,
        per_client=max(limits.connections // 2, 1) if per_client is None else per_client,
        header_seconds=timeouts.header,
        client_seconds=timeouts.client,
        metrics=metrics,
    )
