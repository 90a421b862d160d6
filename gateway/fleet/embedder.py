"""NAME-embedding models on one Triton server: found, watched and called."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2

from llmops.errors import LlmopsError
from llmops.gateway.errors import ApiError, EngineError, ModelNotFoundError, UnavailableError, log_detail
from llmops.gateway.fleet.encoders import EmbeddingCard, EmbeddingModel
from llmops.gateway.fleet.refresher import Refresher
from llmops.gateway.fleet.serving import Standing
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.client import TritonClient

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)
SUFFIX = "-embedding"


class TritonEmbedder:
    """Keeps the list of embedding models fresh while it is started; a model stays known while Triton is away."""

    def __init__(self, address: str, *, timeout: float, refresh_seconds: float) -> None:
        self._address, self._timeout = address, timeout
        self._client: TritonClient | None = None
        self._models: dict[str, EmbeddingModel] = {}
        self._broken: dict[str, str] = {}
        self._reached = self._answers = False
        self._refresher = Refresher("embedding-models", self._refresh, refresh_seconds)

    def get(self, name: str) -> EmbeddingModel:
        if name in self._models:
            return self._models[name]
        if name in self._broken:
            raise UnavailableError(self._broken[name])
        if not self._reached:
            raise UnavailableError("The gateway has not reached Triton yet.")
        raise ModelNotFoundError(name)

    def all(self) -> list[EmbeddingModel]:
        return list(self._models.values())

    def is_ready(self, name: str) -> bool:
        return self._answers and name in self._models

    def problems(self) -> dict[str, str]:
        return self._broken

    async def look(self) -> Standing:
        return Standing({name: name for name in self._models if self._answers}, self._broken)

    async def generates(self, name: str, seconds: float) -> str | None:
        model = self._models[name]
        try:
            await asyncio.wait_for(self.embed(model, [[0]]), seconds)
        except asyncio.TimeoutError:
            return f"The embedding model {name} did not answer within {seconds:g} s."
        except ApiError as error:
            log_detail(error, f"embedding model {name}, asked for a vector")
            return f"The embedding model {name} does not answer: {error.message}"
        return None

    async def start(self) -> None:
        self._client = TritonClient(self._address, timeout=self._timeout)
        await self._refresher.start(self._timeout)

    async def close(self) -> None:
        await self._refresher.close()
        if self._client is not None:
            await self._client.close()

    async def embed(self, model: EmbeddingModel, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        assert self._client is not None, "start() was not called"
        size = model.card.max_batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        answers = await asyncio.gather(*(self._client.infer(_request(model.card, batch)) for batch in batches))
        return _joined(answers, model.card.dimensions)

    async def _refresh(self) -> None:
        try:
            await self._read_models()
        except UnavailableError as error:
            self._answers = False
            log.debug("embedding models: %s", error.message)

    async def _read_models(self) -> None:
        assert self._client is not None
        found: dict[str, EmbeddingModel] = {}
        broken: dict[str, str] = {}
        for triton_name in await self._client.ready_models(SUFFIX):
            try:
                model = await self._load(await self._client.card_text(triton_name))
            except Exception as error:  # noqa: BLE001  whatever it is, it is this model's
                broken[triton_name.removesuffix(SUFFIX)] = self._fault(triton_name.removesuffix(SUFFIX), error)
                continue
            found[model.card.name] = model
        self._models, self._broken, self._reached, self._answers = found, broken, True, True

    def _fault(self, name: str, error: Exception) -> str:
        """What clients hear of it; the log gets the reason once."""
        problem = f"The embedding model {name} cannot be served; the gateway's log says why."
        if name not in self._broken:
            bug = error if not isinstance(error, LlmopsError | ValueError | TypeError | KeyError) else None
            log.warning("the embedding model %s cannot be served: %s", name, error, exc_info=bug)
        return problem

    async def _load(self, text: str) -> EmbeddingModel:
        card = _card(json.loads(text))
        known = self._models.get(card.name)
        if known is not None and known.card == card:
            return known
        return EmbeddingModel(card, await asyncio.to_thread(TextTokenizer, Path(card.tokenizer_dir)))


def _card(raw: dict[str, Any]) -> EmbeddingCard:
    return EmbeddingCard(**{field.name: raw[field.name] for field in fields(EmbeddingCard)})


def _request(card: EmbeddingCard, rows: Sequence[Sequence[int]]) -> service_pb2.ModelInferRequest:
    import numpy as np

    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), dtype=np.int32)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
    lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
    request = service_pb2.ModelInferRequest(model_name=card.name + SUFFIX)
    for name, array in (("input_ids", ids), ("input_lengths", lengths)):
        request.inputs.add(name=name, datatype="INT32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def _joined(answers: Sequence[Any], dimensions: int) -> NDArray[np.float32]:
    import numpy as np

    raw = b"".join(content for answer in answers for content in answer.raw_output_contents)
    if len(raw) % (4 * dimensions):
        raise EngineError("the embedding model's answer has another size than it announced.")
    return np.frombuffer(raw, dtype=np.float32).reshape(-1, dimensions)
