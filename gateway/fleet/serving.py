"""What the endpoints see of the models: each with everything that a request to it needs."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from llmops.contract import LORA_TASK_ID, Tensor
from llmops.gateway.messages import Engine, EngineRequest, ModelCard, Sampling
from llmops.gateway.text.template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.encoder import EncoderCard, TritonEncoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Model(ABC):
    """A name of GET /v1/models. `parent`: the model of which this one is an adapter."""

    __slots__ = ()
    # what is said of one that was asked for an answer and is silent, or failed
    silent: ClassVar[str] = "did not answer"
    failed: ClassVar[str] = "does not answer"

    name: str
    card: ModelCard | EncoderCard
    tokenizer: TextTokenizer
    parent: str | None

    def variants(self) -> Sequence[Model]:
        """All names under which it is served, its own first."""
        return [self]

    @abstractmethod
    def abilities(self) -> dict[str, Any]:
        """What GET /v1/models says of it beyond what all models have."""

    @abstractmethod
    async def answer_once(self) -> None:
        """Have it do the least work there is. Raises ApiError."""

    async def close(self) -> None:
        """Release what it holds."""
        return


M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class ServedModel(Model):
    """A model that generates. An adapter has its base model's parts and its `parent`; `extras` go with every
    request, as in EngineRequest."""

    silent: ClassVar[str] = "made no token"
    failed: ClassVar[str] = "cannot generate"

    name: str
    card: ModelCard
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    engine: Engine
    parent: str | None = None
    extras: Mapping[Tensor, float] = field(default_factory=dict)

    def variants(self) -> Sequence[ServedModel]:
        adapters = [
            replace(self, name=one.name, parent=self.name, extras={LORA_TASK_ID: one.id}) for one in self.card.adapters
        ]
        return [self, *adapters]

    def abilities(self) -> dict[str, Any]:
        return {
            "sampling": {k: v for k, v in asdict(self.card.sampling).items() if v is not None},
            "capabilities": {**asdict(self.card.capabilities), "chat": self.template is not None},
        }

    async def answer_once(self) -> None:
        start = self.card.bos_id if self.card.bos_id is not None else 0
        request = EngineRequest(f"ready-{secrets.token_hex(8)}", [start], 1, Sampling(temperature=0))
        stream = await self.engine.open(request)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()

    async def close(self) -> None:
        await self.engine.close()


@dataclass(frozen=True, slots=True)
class EmbeddingModel(Model):
    """A model that gives each text a vector."""

    name: str
    card: EncoderCard
    tokenizer: TextTokenizer
    encoder: TritonEncoder
    parent: str | None = None

    def abilities(self) -> dict[str, Any]:
        return {"capabilities": {"embeddings": True, "dimensions": self.card.dimensions, "chat": False}}

    async def answer_once(self) -> None:
        await self.embed([[0]])

    async def embed(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Vectors FP32 [len(rows), dimensions] in order. Raises ApiError for what Triton refuses or breaks on."""
        return await self.encoder.run(rows)


@dataclass(frozen=True, slots=True)
class Standing:
    """How models stand now: `ready` has names with the model that serves each (an adapter's is its parent), `broken`
    has names with what is wrong, in a sentence for clients; `problem` is what keeps all of them from being known.
    """

    ready: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
