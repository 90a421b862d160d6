"""Triton's engine models become served models here: the one place that knows both the Triton and the text side."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace
from pathlib import Path

import jinja2

from llmops.errors import LlmopsError
from llmops.gateway.errors import ApiError, ModelNotFoundError, UnavailableError
from llmops.gateway.messages import Engine, EngineRequest, ModelCard, Sampling
from llmops.gateway.refresher import Refresher
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
        self._ready: frozenset[str] = frozenset()
        self._waiting: dict[str, str] = {}
        self._retired: list[Engine] = []
        self._problem: str | None = "The gateway has not reached Triton yet."
        self._reading = asyncio.Lock()
        self._refresher = Refresher("model-registry", self.refresh, settings.refresh_seconds)

    @property
    def _triton(self) -> TritonClient:
        assert self._client is not None, "start() was not called"
        return self._client

    def get(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is not None:
            return model
        if name in self._waiting:
            raise UnavailableError(self._waiting[name])
        if self._problem is not None or not self._models:
            raise UnavailableError(self._problem or "Triton serves no model yet.")
        raise ModelNotFoundError(name)

    def all(self) -> list[ServedModel]:
        return list(self._models.values())

    def is_ready(self, name: str) -> bool:
        """Whether the model could serve when Triton was last asked."""
        model = self._models.get(name)
        return model is not None and (model.parent or name) in self._ready

    async def ready(self) -> str | None:
        """None when Triton and every model can serve; otherwise what is missing, in one sentence."""
        if not await self._triton.server_ready():
            return f"Triton at {self._triton.address} is not ready."
        await self.refresh()
        if self._waiting:
            return next(iter(self._waiting.values()))
        if not self._models:
            return self._problem or "Triton serves no engine model."
        missing = sorted(set(self._bases) - self._ready)
        return f"The model {missing[0]} is not ready." if missing else None

    async def generates(self, seconds: float) -> str | None:
        """None when every model has just made a token within `seconds`; otherwise which did not, and why."""
        for name, model in list(self._bases.items()):
            try:
                await asyncio.wait_for(_make_one_token(model), seconds)
            except asyncio.TimeoutError:
                return f"The model {name} made no token within {seconds:g} s."
            except ApiError as error:
                return f"The model {name} cannot generate: {error.message}"
        return None

    async def refresh(self) -> None:
        """Read Triton's models and cards anew. Problems are kept for the answers, and logged once."""
        try:
            async with self._reading:
                await self._read_models()
        except ApiError as error:
            self._ready = frozenset()
            if error.message != self._problem:
                log.warning("%s", error.message)
            self._problem = error.message
        else:
            self._problem = None

    async def start(self) -> None:
        """Connect, look once if Triton answers in time, and keep the list fresh in the background until `close`."""
        self._client = TritonClient(self._settings.triton, timeout=self._settings.timeouts.connect)
        await self._refresher.start(self._settings.timeouts.connect)

    async def close(self) -> None:
        await self._refresher.close()
        for engine in [*self._retired, *(base.engine for base in self._bases.values())]:
            await engine.close()
        if self._client is not None:
            await self._client.close()

    async def _read_models(self) -> None:
        engine_models = await self._triton.engine_models()
        named = {over.engine_model: name for name, over in self._settings.models.items() if over.engine_model}
        engine_models.update({model: await self._triton.model_ready(model) for model in named})
        ready, waiting = set(), {}
        for engine_model, is_ready in engine_models.items():
            name = named.get(engine_model, engine_model.removesuffix(ENGINE_SUFFIX))
            if not is_ready:
                if name not in self._bases:
                    waiting[name] = f"The model {name} is not ready."
                continue
            problem = await self._load(name, engine_model)
            if problem is None:
                ready.add(name)
            else:
                waiting[name] = problem
        self._forget(set(self._bases) - {named.get(one, one.removesuffix(ENGINE_SUFFIX)) for one in engine_models})
        self._ready, self._waiting = frozenset(ready), waiting
        self._models = {model.name: model for base in self._bases.values() for model in _with_adapters(base)}

    async def _load(self, name: str, engine_model: str) -> str | None:
        """Make the model servable, anew when its card has changed. Returns what is wrong with it, if anything is."""
        overrides = self._settings.models.get(name, ModelOverrides()).card_fields()
        text = await self._triton.card_text(engine_model)
        try:
            card = parse_card(text, {"name": name, **overrides})
            if name in self._bases and self._bases[name].card == card:
                return None
            model = await asyncio.to_thread(self._assemble, card, engine_model)
        except LlmopsError as error:
            problem = f"The model {name} cannot be served: {error.message}"
            if self._waiting.get(name) != problem:
                log.warning("%s", problem)
            return problem
        self._forget({name} & set(self._bases))
        self._bases[name] = model
        log.info("serving model %s (target %s, %d tokens of context)", name, card.target, card.max_seq_len)
        return None

    def _forget(self, names: set[str]) -> None:
        """Models that went or changed. Their open streams may end, so their engines are closed only at the end."""
        for name in names:
            self._retired.append(self._bases.pop(name).engine)

    def _assemble(self, card: ModelCard, engine_model: str) -> ServedModel:
        tokenizer = TextTokenizer(Path(card.tokenizer_dir))
        template = self._template(tokenizer)
        transport = StepStreams if StepStreams.name in card.transports else RequestStreams
        engine = transport(self._triton.start_call, engine_model, card)
        return ServedModel(card.name, card, tokenizer, template, engine)

    def _template(self, tokenizer: TextTokenizer) -> ChatTemplate | None:
        if tokenizer.chat_template is None:
            return None
        seconds = self._settings.limits.template_seconds
        try:
            return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, seconds=seconds)
        except jinja2.TemplateSyntaxError as error:
            log.warning("the chat template is not usable: %s", error)
            return None


def _with_adapters(base: ServedModel) -> list[ServedModel]:
    adapters = [replace(base, name=one.name, parent=base.name, lora_id=one.id) for one in base.card.adapters]
    return [base, *adapters]


async def _make_one_token(model: ServedModel) -> None:
    start = model.card.bos_id if model.card.bos_id is not None else 0
    request = EngineRequest(f"ready-{secrets.token_hex(8)}", [start], 1, Sampling(temperature=0))
    stream = await model.engine.open(request)
    try:
        async for _ in stream:
            pass
    finally:
        stream.cancel()
