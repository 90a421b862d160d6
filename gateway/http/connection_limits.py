"""Bounds on all connections of one gateway together.

They bound the number of connections, and the bytes that wait behind or in front of them.

When all connections are in use, connections without a complete request are closed to make room for
new ones.
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

#: Seconds between two lines in the log with the same reason.
LOG_INTERVAL = 10.0
#: File descriptors reserved for Triton, stores and files. Clients get the others.
RESERVED_DESCRIPTORS = 64
#: Bytes that may wait behind requests of all connections. Reading a socket once yields up to 256
#: KiB.
MAX_PIPELINED_BYTES_TOTAL = 16 * 2**20
#: Bytes of responses that clients do not read, of all connections. Only what exceeds 64 KiB per
#: connection counts.
MAX_UNREAD_BYTES_TOTAL = 64 * 2**20
#: Bytes of incomplete headers of all connections. Only headers of more than 4 KiB count.
MAX_HEADER_BYTES_TOTAL = 16 * 2**20
#: Pipelined requests that start in one turn of the event loop, on all connections. A turn that
#: started one of each of 400 connections would keep new connections and other clients waiting.
PIPELINED_REQUESTS_PER_TURN = 8
#: The search for connections to close is expensive, so one in this many is closed at once.
EVICTION_DIVISOR = 64
#: The place of connections that do not read a response among those to close, behind those whose
#: `progress` is a number.
UNREAD = 3
#: Seconds without another search after one that found no connection to close.
EVICTION_RETRY_DELAY = 0.1


class Connection(Protocol):
    """A connection, as the limits see it."""

    address: str | None

    @property
    def progress(self) -> int | None:
        """Return how far the connection's next request has come.

        The number is 0 before the first request, 1 between requests, 2 within a request, and None
        during a response.
        """

    def evict(self) -> None:
        """Close the connection to make room for another."""

    def abort(self) -> None:
        """Drop the connection and everything its client has not read."""

    def read_pipelined(self) -> None:
        """Parse what arrived behind the request that has been answered."""


@dataclass(slots=True)
class HeldBytes:
    """Bytes that wait on connections: at most `limit` on all of them together."""

    limit: int
    sizes: dict[Connection, int] = field(default_factory=dict)
    total: int = 0

    def hold(self, connection: Connection, size: int) -> Sequence[Connection]:
        """Note how many bytes wait on a connection.

        Beyond the limit, return the connections to be dropped: those of the addresses that hold the
        most.
        """
        self.release(connection)
        self.sizes[connection] = size
        self.total += size
        dropped: list[Connection] = []
        if self.total > self.limit:
            # a quarter at once: the order is expensive
            for worst in _worst_first(self.sizes):
                if self.total <= self.limit * 3 // 4:
                    break
                self.release(worst)
                dropped.append(worst)
        return dropped

    def release(self, connection: Connection) -> None:
        """Stop counting the bytes of a connection."""
        self.total -= self.sizes.pop(connection, 0)


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of all connections of one gateway, and what counts against them.

    Attributes:
        header_bytes: The largest header of a request.
        connections: The most connections.
        per_client: The most connections of one address, 0 for any number.
        header_seconds: Time for a client to send a header.
        client_seconds: Time within which a client must read some of its response.
        metrics: Count rejected connections, if there are any.
        open: Open connections.
        clients: Connections by address, the oldest first.
        rejecting: Connections that are being rejected.
        pipelined: Bytes that wait behind requests.
        unread: Connections whose clients do not read, with the bytes in their buffers.
        unfinished: Bytes of large headers that are incomplete.
        descriptors: File descriptors that the process may have.
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
    _answered: deque[Connection] = field(default_factory=deque)

    def queue_pipelined(self, connection: Connection) -> None:
        """Let a connection go on with the bytes behind its answered request, when it is its turn."""
        self._answered.append(connection)
        if len(self._answered) == 1:
            asyncio.get_running_loop().call_soon(self._read_pipelined)

    def _read_pipelined(self) -> None:
        for _ in range(min(PIPELINED_REQUESTS_PER_TURN, len(self._answered))):
            self._answered.popleft().read_pipelined()
        if self._answered:
            asyncio.get_running_loop().call_soon(self._read_pipelined)

    def reason_to_reject(self, descriptor: int, address: str) -> str | None:
        """Return why a new connection cannot be accepted, None if it can.

        `descriptor` is the lowest free one.
        """
        if self.per_client and len(self.clients.get(address, ())) >= self.per_client:
            return f"{address} has {self.per_client}, as many as limits.connections_per_client allows"
        if descriptor >= self.descriptors - RESERVED_DESCRIPTORS and not self._make_room():
            return f"the process has nearly all of its {self.descriptors} file descriptors in use"
        if self.open >= self.connections and not self._make_room():
            return f"{self.connections} connections are open, as many as limits.connections allows"
        return None

    def add(self, address: str, connection: Connection) -> None:
        """Count a connection."""
        self.open += 1
        self.clients.setdefault(address, {})[connection] = None

    def remove(self, address: str, connection: Connection) -> None:
        """Stop counting a connection."""
        self.open -= 1
        same_client = self.clients[address]
        del same_client[connection]
        if not same_client:
            del self.clients[address]

    def hold_pipelined(self, connection: Connection, size: int) -> None:
        """Note the bytes that wait behind a request. Beyond the limit, drop the worst connections."""
        for worst in self.pipelined.hold(connection, size):
            self.report("pipeline", f"Too many requests of {worst.address} wait behind others; dropped.")
            worst.abort()

    def hold_unread(self, connection: Connection, size: int) -> None:
        """Note that a client does not read.

        Beyond the limit, drop the largest response of the worst address.
        """
        self.unread[connection] = size
        if sum(self.unread.values()) <= MAX_UNREAD_BYTES_TOTAL:
            return
        worst = _worst_first(self.unread)[0]
        self.report("unread", f"{worst.address} left {self.unread[worst]} bytes of an answer unread; it was dropped.")
        del self.unread[worst]
        worst.abort()

    def hold_header(self, connection: Connection, size: int) -> None:
        """Note the bytes of a large incomplete header. Beyond the limit, drop the worst connections."""
        for worst in self.unfinished.hold(connection, size):
            self.report("header_bytes", f"A header of {worst.address} was incomplete and too large; dropped.")
            worst.abort()

    def report(self, reason: str, message: str) -> None:
        """Count a closed connection and log it, at most once per LOG_INTERVAL and reason."""
        if self.metrics is not None:
            self.metrics.refused.labels(reason).inc()
        if (suffix := self._lines.suffix(reason)) is not None:
            log.warning("%s%s", message, suffix)

    def _make_room(self) -> bool:
        """Close some of the connections without a complete request, or with an unread response.

        Returns False if there are none.

        Connections that never had a request go first, then idle ones, then those whose request is
        incomplete, and at last those that do not read a response; of each kind those of the address
        with the most connections, the oldest first.
        """
        if monotonic() < self._next_eviction:
            return False
        evicted = heapq.nsmallest(max(self.connections // EVICTION_DIVISOR, 1), self._evictable())
        for *_, connection in evicted:
            connection.evict()
        if not evicted:
            self._next_eviction = monotonic() + EVICTION_RETRY_DELAY
        return bool(evicted)

    def _evictable(self) -> Iterator[tuple[int, int, int, Connection]]:
        # the number is unique, so that connections themselves are never compared
        number = 0
        for same_client in self.clients.values():
            for connection in same_client:
                number += 1
                progress = connection.progress
                if progress is None and connection in self.unread:
                    progress = UNREAD
                if progress is not None:
                    yield progress, -len(same_client), number, connection


def _worst_first(held: Mapping[Connection, int]) -> list[Connection]:
    """Return connections, those of the address that holds the most first, of these the largest."""
    totals: dict[str | None, int] = {}
    for one, size in held.items():
        totals[one.address] = totals.get(one.address, 0) + size
    return sorted(held, key=lambda one: (totals[one.address], held[one]), reverse=True)


def connection_limits(settings: GatewaySettings, metrics: GatewayMetrics | None = None) -> ConnectionLimits:
    """Return the limits that `settings` describe."""
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
