"""Triton's engine models become served models here: the one place that knows both the Triton and the text side."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import jinja2

from llmops.errors import LlmopsError
from llmops.gateway.errors import ApiError, ModelNotFoundError, UnavailableError
from llmops.gateway.messages import ModelCard
from llmops.gateway.serving import ServedModel
from llmops.gateway.settings import GatewaySettings, ModelOverrides
from llmops.gateway.text.template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.card import parse_card
from llmops.gateway.triton.client import ENGINE_SUFFIX, TritonClient
from llmops.gateway.triton.request_stream import RequestStreams
from llmops.gateway.triton.step_stream import StepStreams

log = logging.getLogger(__name__)


class ModelRegistry:
    """Watches one Triton server. A model stays known while Triton is away, so that requests get 503 and not 404."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._client: TritonClient | None = None
        self._bases: dict[str, ServedModel] = {}
        self._models: dict[str, ServedModel] = {}
        self._engine_models: dict[str, str] = {}
        self._problem: str | None = "The gateway has not reached Triton yet."
        self._reading = asyncio.Lock()
        self._watcher: asyncio.Task | None = None

    @property
    def _triton(self) -> TritonClient:
        assert self._client is not None, "start() was not called"
        return self._client

    def get(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is not None:
            return model
        if not self._models:
            raise UnavailableError(self._problem or "Triton serves no model yet.")
        raise ModelNotFoundError(name)

    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    async def ready(self) -> str | None:
        """None when Triton and every model can serve; otherwise what is missing, in one sentence."""
        if not await self._triton.server_ready():
            return f"Triton at {self._triton.address} is not ready."
        if not self._models:
            await self.refresh()
        if not self._models:
            return self._problem or "Triton serves no engine model."
        for name, engine_model in self._engine_models.items():
            if not await self._triton.model_ready(engine_model):
                return f"The model {name} is not ready."
        return None

    async def refresh(self) -> None:
        """Read Triton's models and cards anew. Problems are kept for the answers, and logged once."""
        try:
            async with self._reading:
                await self._read_models()
        except ApiError as error:
            self._note(error.message)
        else:
            if self._models:
                self._problem = None

    async def start(self) -> None:
        """Connect, and keep the list fresh in the background until `close`."""
        self._client = TritonClient(self._settings.triton, timeout=self._settings.timeouts.connect)
        self._watcher = asyncio.create_task(self._watch(), name="model-registry")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _watch(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self._settings.refresh_seconds)

    async def _read_models(self) -> None:
        found = await self._find_engine_models()
        bases: dict[str, ServedModel] = {}
        for name, engine_model in found.items():
            try:
                bases[name] = await self._load(name, engine_model)
            except LlmopsError as error:
                self._note(f"The model {name} cannot be served: {error.message}")
        self._engine_models = {name: found[name] for name in bases}
        self._bases = bases
        self._models = {model.name: model for base in bases.values() for model in _with_adapters(base)}

    async def _find_engine_models(self) -> dict[str, str]:
        """Served name to engine model: what is configured, and what ends in -tensorrt_llm."""
        ready = await self._triton.engine_models()
        named = {name: over.engine_model for name, over in self._settings.models.items() if over.engine_model}
        found = {name: model for name, model in named.items() if await self._triton.model_ready(model)}
        for model in ready:
            if model not in named.values():
                found[model.removesuffix(ENGINE_SUFFIX)] = model
        return found

    async def _load(self, name: str, engine_model: str) -> ServedModel:
        overrides = self._settings.models.get(name, ModelOverrides()).card_fields()
        card = parse_card(await self._triton.card_text(engine_model), {"name": name, **overrides})
        known = self._bases.get(name)
        if known is not None and known.card == card:
            return known
        model = await asyncio.to_thread(self._assemble, card, engine_model)
        log.info("serving model %s (target %s, %d tokens of context)", name, card.target, card.max_seq_len)
        return model

    def _assemble(self, card: ModelCard, engine_model: str) -> ServedModel:
        tokenizer = TextTokenizer(Path(card.tokenizer_dir))
        template = _template(tokenizer)
        transport = StepStreams if StepStreams.name in card.transports else RequestStreams
        engine = transport(self._triton.start_call, engine_model, card)
        return ServedModel(card.name, card, tokenizer, template, engine)

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem


def _with_adapters(base: ServedModel) -> list[ServedModel]:
    adapters = [replace(base, name=one.name, parent=base.name, lora_id=one.id) for one in base.card.adapters]
    return [base, *adapters]


def _template(tokenizer: TextTokenizer) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    except jinja2.TemplateSyntaxError as error:
        log.warning("the chat template is not usable: %s", error)
        return None
