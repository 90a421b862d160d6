"""Faults that a rehearsal plants into the answers of a new version."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Sequence

from llmops.gateway.errors import EngineError
from llmops.gateway.interfaces import (
    Engine,
    EngineRequest,
    ForwardingStream,
    SchedulingParams,
    TokenBatch,
    TokenStream,
)
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool

FAULTS = ("slow", "errors", "scrambled", "language", "quality")
PLANTED_ERROR = "An error that the rehearsal has planted."
#: One request of this many fails with the fault `errors`, and one token of QUALITY_PERIOD is
#: replaced with the fault `quality`.
ERROR_PERIOD, QUALITY_PERIOD = 20, 12
_THAI = "สวัสดีครับ ผมไม่เข้าใจคำถามของคุณ กรุณาลองอีกครั้ง "


class FaultyEngine(Engine):
    """The replicas of a version, with a fault."""

    def __init__(self, pool: ReplicaPool, fault: str) -> None:
        self.gated = pool.gated
        self._pool, self._fault, self._requests = pool, fault, itertools.count(1)

    def check(self, turn: SchedulingParams) -> None:
        self._pool.check(turn)

    async def open(self, request: EngineRequest) -> TokenStream:
        if self._fault == "errors" and next(self._requests) % ERROR_PERIOD == 0:
            raise EngineError(PLANTED_ERROR)
        stream = await self._pool.open(request)
        return FaultyStream(stream, self._fault, request.end_ids, self._pool)


class FaultyStream(ForwardingStream):
    """The tokens of a request, with a fault."""

    def __init__(self, stream: TokenStream, fault: str, end_ids: Collection[int], pool: ReplicaPool) -> None:
        super().__init__(stream)
        self._fault, self._end_ids = fault, end_ids
        model = next(iter(pool.replicas.values())).model
        self._vocabulary = model.card.vocab_size
        thai: Sequence[int] = model.tokenizer.encode(_THAI, add_special_tokens=False)
        self._thai = itertools.cycle(thai)
        self._count, self._last = 0, time.perf_counter()

    async def __anext__(self) -> TokenBatch:
        batch = await self._stream.__anext__()
        if self._fault == "slow":
            await asyncio.sleep(time.perf_counter() - self._last)
            self._last = time.perf_counter()
        return batch._replace(tokens=[self._replace(token) for token in batch.tokens])

    def _replace(self, token: int) -> int:
        self._count += 1
        if token in self._end_ids:
            return token
        match self._fault:
            case "scrambled":
                return 100 + (token * 7919 + 13) % (self._vocabulary - 200)
            case "language":
                return next(self._thai)
            case "quality" if self._count % QUALITY_PERIOD == 0:
                return 100 + (token + 1) % (self._vocabulary - 200)
            case _:
                return token
