"""The models as endpoints use them, each with everything that a request to the model needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmops.contract import LORA_TASK_ID, Tensor
from llmops.gateway.interfaces import Engine, ModelMetadata
from llmops.gateway.text.chat_template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.encoder_client import TritonEncoder
from llmops.gateway.triton.model_metadata import EncoderMetadata


class Model(ABC):
    """A model of GET /v1/models. `parent` is the name of an adapter's base model."""

    name: str
    card: ModelMetadata | EncoderMetadata
    tokenizer: TextTokenizer
    parent: str | None

    def variants(self) -> Sequence[Model]:
        """Return the model and its adapters, each under its name."""
        return [self]

    @abstractmethod
    def abilities(self) -> dict[str, Any]:
        """Return the fields of GET /v1/models that only some models have."""

    async def close(self) -> None:
        """Close the connections of the model."""
        return


M = TypeVar("M", bound=Model)
E = TypeVar("E", bound="EncoderModel")


@dataclass(frozen=True, slots=True)
class GenerativeModel(Model):
    """A model that generates text. An adapter shares the parts of its base model.

    `extras` are sent with every request; see EngineRequest. `version` is "" for a model that has
    had no roll-out.
    """

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

    async def close(self) -> None:
        await self.engine.close()


class EncoderInput(NamedTuple):
    """A row of an encoder's input: token ids, and the token type of each token."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class EncoderModel(Model):
    """A model that encodes texts and can score how relevant documents are to a query."""

    # True if the query is encoded again with each document
    reads_pairs: ClassVar[bool] = False

    name: str
    card: EncoderMetadata
    tokenizer: TextTokenizer
    encoder: TritonEncoder
    parent: str | None = None

    @abstractmethod
    def room(self, query: int) -> int:
        """Return the maximum tokens of a document beside a query of `query` tokens.

        The result is 0 if the query is too long.
        """

    @abstractmethod
    def rows(self, query: Sequence[int], documents: Sequence[Sequence[int]]) -> list[EncoderInput]:
        """Return the rows that `scores` needs. Token ids must not include special tokens."""

    @abstractmethod
    async def scores(self, rows: Sequence[EncoderInput], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        """Return the relevance of each document; higher is more relevant.

        Raises the errors of TritonEncoder.
        """


@dataclass(frozen=True, slots=True)
class EmbeddingModel(EncoderModel):
    """A model that turns each text into a vector. Scores are cosines, from -1 to 1."""

    def abilities(self) -> dict[str, Any]:
        does = {"embeddings": True, "rerank": True, "dimensions": self.card.dimensions, "chat": False}
        return {"capabilities": does}

    async def embed(self, rows: Sequence[Sequence[int]], caller: str = "", trace: str = "") -> NDArray[np.float32]:
        """Return the vectors of `rows` in order, FP32 [len(rows), dimensions].

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
    """A model that encodes query and document together. Scores are from 0 to 1."""

    reads_pairs: ClassVar[bool] = True

    def abilities(self) -> dict[str, Any]:
        return {"capabilities": {"embeddings": False, "rerank": True, "chat": False}}

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
        ready: The names of the ready models and adapters.
        broken: For each other model, its problem as a sentence for clients.
        problem: Reason why no model is known, or None.
    """

    ready: Sequence[str] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
