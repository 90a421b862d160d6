"""What the endpoints see of the models: each with everything that a request to it needs."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from llmops.contract import LORA_TASK_ID, Tensor
from llmops.gateway.interfaces import Engine, EngineRequest, ModelMetadata, SamplingParams
from llmops.gateway.text.chat_template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.encoder_client import TritonEncoder
from llmops.gateway.triton.model_metadata import EncoderMetadata

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
    card: ModelMetadata | EncoderMetadata
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
E = TypeVar("E", bound="EncoderModel")


@dataclass(frozen=True, slots=True)
class GenerativeModel(Model):
    """A model that generates. An adapter has its base model's parts and its `parent`; `extras` go with every
    request, as in EngineRequest."""

    silent: ClassVar[str] = "made no token"
    failed: ClassVar[str] = "cannot generate"

    name: str
    card: ModelMetadata
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    engine: Engine
    parent: str | None = None
    extras: Mapping[Tensor, float] = field(default_factory=dict)

    def variants(self) -> Sequence[GenerativeModel]:
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
        request = EngineRequest(f"ready-{secrets.token_hex(8)}", [start], 1, SamplingParams(temperature=0))
        stream = await self.engine.open(request)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()

    async def close(self) -> None:
        await self.engine.close()


class EncoderInput(NamedTuple):
    """What an encoder reads at once: token ids, and to which of several texts each belongs."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class EncoderModel(Model):
    """A model that reads texts and generates none. It can say how much each of several documents has to do with a
    query."""

    # whether the query is read again with each document
    reads_pairs: ClassVar[bool] = False

    name: str
    card: EncoderMetadata
    tokenizer: TextTokenizer
    encoder: TritonEncoder
    parent: str | None = None

    @abstractmethod
    def room(self, query: int) -> int:
        """Tokens that a document may have beside a query of `query` tokens; none when that alone is too long."""

    @abstractmethod
    def rows(self, query: Sequence[int], documents: Sequence[Sequence[int]]) -> list[EncoderInput]:
        """What has to be run for `scores`. Token ids come without special tokens."""

    @abstractmethod
    async def scores(self, rows: Sequence[EncoderInput], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        """One number for each document, higher for one that has more to do with the query. Raises as TritonEncoder."""


@dataclass(frozen=True, slots=True)
class EmbeddingModel(EncoderModel):
    """A model that gives each text a vector; scores are their cosines, from -1 to 1."""

    def abilities(self) -> dict[str, Any]:
        does = {"embeddings": True, "rerank": True, "dimensions": self.card.dimensions, "chat": False}
        return {"capabilities": does}

    async def answer_once(self) -> None:
        await self.embed([[0]])

    async def embed(self, rows: Sequence[Sequence[int]], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        """Vectors FP32 [len(rows), dimensions] in order. Raises as TritonEncoder does."""
        return await self.encoder.run(rows, caller=caller, trace=trace)

    def room(self, query: int) -> int:
        room = self.card.max_seq_len - self.tokenizer.frame.size
        return room if query <= room else 0

    def rows(self, query: Sequence[int], documents: Sequence[Sequence[int]]) -> list[EncoderInput]:
        return [EncoderInput(self.tokenizer.frame.ids(text)) for text in (query, *documents)]

    async def scores(self, rows: Sequence[EncoderInput], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        import numpy as np

        vectors = await self.embed([row.ids for row in rows], caller, trace)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.asarray(vectors[1:] @ vectors[0], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class CrossEncoder(EncoderModel):
    """A model that reads query and document together; scores are from 0 to 1."""

    reads_pairs: ClassVar[bool] = True

    def abilities(self) -> dict[str, Any]:
        return {"capabilities": {"embeddings": False, "rerank": True, "chat": False}}

    async def answer_once(self) -> None:
        await self.scores([EncoderInput([0], [0])])

    def room(self, query: int) -> int:
        return max(0, self.card.max_seq_len - self.tokenizer.pair_frame.size - query)

    def rows(self, query: Sequence[int], documents: Sequence[Sequence[int]]) -> list[EncoderInput]:
        frame = self.tokenizer.pair_frame
        return [EncoderInput(frame.ids(query, one), frame.types(query, one)) for one in documents]

    async def scores(self, rows: Sequence[EncoderInput], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        types = [row.types for row in rows if row.types is not None]
        scores = await self.encoder.run([row.ids for row in rows], types, caller, trace)
        return scores[:, 0]


@dataclass(frozen=True, slots=True)
class ModelReadiness:
    """How models stand now: `ready` has names with the model that serves each (an adapter's is its parent), `broken`
    has names with what is wrong, in a sentence for clients; `problem` is what keeps all of them from being known.
    """

    ready: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
