"""An engine of several replicas whose answers outlive each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmops.gateway.interfaces import Engine, EngineRequest, SchedulingParams, TokenStream
from llmops.gateway.routing.failover import FailoverReason, FailoverStream
from llmops.gateway.telemetry.event_loop_lag import PROCESS_STALL_THRESHOLD


class FailoverEngine(Engine):
    """Opens requests through `fleet`, and has those go on elsewhere that a replica cannot finish."""

    def __init__(self, fleet: Engine, count: Callable[[FailoverReason], None], *, exact: bool, silence: float) -> None:
        """`count` hears of every move; `exact`: what a request gets depends on nothing else in its batch; `silence`:
        seconds without a token after which a replica is suspected."""
        self.exact, self.gated = exact, fleet.gated
        self._fleet, self._count, self._silence = fleet, count, silence
        self._streams: set[FailoverStream] = set()
        self._watch: asyncio.TimerHandle | None = None

    def check(self, turn: SchedulingParams) -> None:
        self._fleet.check(turn)

    async def open(self, request: EngineRequest) -> TokenStream:
        return FailoverStream(self, request, await self._fleet.open(request))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._fleet.close()

    def leave(self, replica: str, reason: FailoverReason) -> None:
        """Have everything that runs on `replica` go on elsewhere; it keeps what there is no place for."""
        for stream in [stream for stream in self._streams if stream.replica == replica]:
            stream.move(reason)

    # -- what its streams need ----------------------------------------------------------------------------------------
    async def place(self, request: EngineRequest) -> TokenStream:
        return await self._fleet.open(request)

    def joined(self, stream: FailoverStream) -> None:
        self._streams.add(stream)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._silence / 4, self._look)

    def left(self, stream: FailoverStream) -> None:
        self._streams.discard(stream)

    def moved(self, reason: FailoverReason) -> None:
        self._count(reason)

    def _look(self) -> None:
        """A few times per silence: no clock is asked per token."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._watch is not None and now - self._watch.when() < PROCESS_STALL_THRESHOLD:
            for stream in [stream for stream in self._streams if stream.silent(now, self._silence)]:
                stream.move("suspect")
        self._watch = loop.call_later(self._silence / 4, self._look) if self._streams else None
