"""Faults that `llmops rollout rehearse` plants into the answers of a new version."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, cast

from llmops.gateway.errors import ApiError, EngineError
from llmops.gateway.interfaces import Engine, EngineRequest, SchedulingParams, TokenBatch, TokenSink, TokenStream
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.routing.served_models import GenerativeModel

PLANTED_ERROR = "An error that the rehearsal has planted."
#: The fault `errors` fails one of this many requests: far more than an objective allows.
ERROR_PERIOD = 20
#: The fault `quality` replaces one of this many prompt tokens, so that answers stay fluent and are
#: wrong more often.
QUALITY_PERIOD = 3
#: Delay that the fault `slow` adds per token, as a multiple of the stable version's time per token.
#: The engine continues meanwhile, so a delay of one such time would hardly delay later tokens.
SLOWNESS = 2.0
#: Lowest token id that is replaced. Lower ids may be special tokens of the chat template.
FIRST_TEXT_TOKEN = 100
_THAI = "สวัสดีครับ ผมไม่เข้าใจคำถามของคุณ กรุณาลองอีกครั้ง "


class PlantedError(EngineError):
    """A planted error, which clients can tell from other errors of an engine by its message."""

    def __init__(self) -> None:
        ApiError.__init__(self, PLANTED_ERROR)


class FaultyEngine(Engine):
    """The replicas of a version as an engine with a planted fault."""

    def __init__(self, pool: ReplicaPool, fault: str, pace: Callable[[], float]) -> None:
        """Plant a fault.

        Args:
            pool: The replicas of the version.
            fault: The name of the fault: errors, quality, slow, scrambled or language.
            pace: A function that returns the stable version's seconds per token.
        """
        self.gated = pool.gated
        self.pool, self.fault, self.pace, self._requests = pool, fault, pace, itertools.count(1)

    def check(self, turn: SchedulingParams) -> None:
        self.pool.check(turn)

    async def open(self, request: EngineRequest) -> TokenStream:
        if self.fault == "errors" and next(self._requests) % ERROR_PERIOD == 0:
            raise PlantedError
        if self.fault == "quality":
            request = replace(request, input_ids=[*_misread(request.input_ids, self.model.card.vocab_size)])
        return cast(TokenStream, FaultyStream(await self.pool.open(request), request.end_ids, self))

    @property
    def model(self) -> GenerativeModel:
        """Return the model that the replicas serve."""
        return next(iter(self.pool.replicas.values())).model


def _misread(ids: Sequence[int], vocabulary: int) -> Iterator[int]:
    for at, token in enumerate(ids):
        is_changed = at % QUALITY_PERIOD == 0 and token >= FIRST_TEXT_TOKEN
        yield FIRST_TEXT_TOKEN + (token + 1) % (vocabulary - FIRST_TEXT_TOKEN) if is_changed else token


class FaultyStream:
    """The token stream of a request with a planted fault.

    All other attributes are the original stream's.
    """

    def __init__(self, stream: TokenStream, end_ids: Collection[int], engine: FaultyEngine) -> None:
        self._stream, self._end_ids, self._engine = stream, end_ids, engine
        # The vocabulary size is read now, because the replicas may be gone before the stream ends.
        self._vocabulary = engine.model.card.vocab_size
        self._thai = itertools.cycle(engine.model.tokenizer.encode(_THAI, add_special_tokens=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Self:
        return self

    def attach(self, sink: TokenSink, taken: list[TokenBatch] | None = None) -> None:
        """Ignore the sink, so that the reader gets all batches."""

    async def __anext__(self) -> TokenBatch:
        batch = await self._stream.__anext__()
        if self._engine.fault == "slow":
            await asyncio.sleep(SLOWNESS * self._engine.pace() * len(batch.tokens))
        return batch._replace(tokens=[self._replace(token) for token in batch.tokens])

    def _replace(self, token: int) -> int:
        if token in self._end_ids:
            return token
        match self._engine.fault:
            case "scrambled":
                return 100 + (token * 7919 + 13) % (self._vocabulary - 200)
            case "language":
                return next(self._thai)
            case _:
                return token
