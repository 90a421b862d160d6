"""The models as endpoints use them, each with everything that a request to it needs."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmops.contract import LORA_TASK_ID, Tensor
from llmops.gateway.interfaces import Engine, EngineRequest, ModelMetadata, SamplingParams
from llmops.gateway.text.chat_template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.encoder_client import TritonEncoder
from llmops.gateway.triton.model_metadata import EncoderMetadata


class Model(ABC):
    """A model of GET /v1/models. For an adapter `parent` is the name of its base model."""

    # words for a model that did not answer a readiness check in time, or failed on it
    silent: ClassVar[str] = "did not answer"
    failed: ClassVar[str] = "does not answer"

    name: str
    card: ModelMetadata | EncoderMetadata
    tokenizer: TextTokenizer
    parent: str | None

    def variants(self) -> Sequence[Model]:
        """Return the model and its adapters, each under its name."""
        return [self]

    @abstractmethod
    def abilities(self) -> dict[str, Any]:
        """Return what GET /v1/models shows beyond the fields that all models have."""

    @abstractmethod
    async def answer_once(self) -> None:
        """Do the least work that shows that the model can serve. Raises ApiError."""

    async def close(self) -> None:
        """Close the connections of the model."""
        return


M = TypeVar("M", bound=Model)
E = TypeVar("E", bound="EncoderModel")


@dataclass(frozen=True, slots=True)
class GenerativeModel(Model):
    """A model that generates text. An adapter shares the parts of its base model.

    `extras` are sent with every request, as in EngineRequest. `version` is empty for a model that
    has had no roll-out.
    """

    silent: ClassVar[str] = "made no token"
    failed: ClassVar[str] = "cannot generate"

    name: str
    card: ModelMetadata
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    engine: Engine
    parent: str | None = None
    extras: Mapping[Tensor, float] = field(default_factory=dict)
    version: str = ""

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
    """One row of an encoder's input: token ids, and for each token the number of its text."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class EncoderModel(Model):
    """A model that encodes texts. It can score the relevance of documents to a query."""

    # True if the query is encoded again with each document
    reads_pairs: ClassVar[bool] = False

    name: str
    card: EncoderMetadata
    tokenizer: TextTokenizer
    encoder: TritonEncoder
    parent: str | None = None

    @abstractmethod
    def room(self, query: int) -> int:
        """Return the tokens that a document may have beside a query of `query` tokens.

        The result is 0 if the query is too long.
        """

    @abstractmethod
    def rows(self, query: Sequence[int], documents: Sequence[Sequence[int]]) -> list[EncoderInput]:
        """Return the rows that `scores` needs. Token ids are without special tokens."""

    @abstractmethod
    async def scores(self, rows: Sequence[EncoderInput], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        """Return the relevance of each document; higher is more relevant.

        Raises the errors of TritonEncoder.
        """


@dataclass(frozen=True, slots=True)
class EmbeddingModel(EncoderModel):
    """A model that turns each text into a vector; scores are cosines, from -1 to 1."""

    def abilities(self) -> dict[str, Any]:
        does = {"embeddings": True, "rerank": True, "dimensions": self.card.dimensions, "chat": False}
        return {"capabilities": does}

    async def answer_once(self) -> None:
        await self.embed([[0]])

    async def embed(self, rows: Sequence[Sequence[int]], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        """Return vectors FP32 [len(rows), dimensions] in order.

        Raises the errors of TritonEncoder.
        """
        return await self.encoder.run(rows, caller=caller, trace=trace)

    def room(self, query: int) -> int:
        room = self.card.max_seq_len - self.tokenizer.frame.size
        return room if query <= room else 0

    def rows(self, query: Sequence[int], documents: Sequence[Sequence[int]]) -> list[EncoderInput]:
        return [EncoderInput(self.tokenizer.frame.ids(text)) for text in (query, *documents)]

    async def scores(self, rows: Sequence[EncoderInput], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        vectors = await self.embed([row.ids for row in rows], caller, trace)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.asarray(vectors[1:] @ vectors[0], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class CrossEncoder(EncoderModel):
    """A model that encodes query and document together; scores are from 0 to 1."""

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
    """The readiness of all models.

    Attributes:
        ready: Names of ready models with the model that serves each; for an adapter that is its
            base model.
        broken: Names of the others with their problem, in a sentence for clients.
        problem: Why no model can be known, or None.
    """

    ready: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
