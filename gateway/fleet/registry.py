"""Triton's engine models become served models here: the one place that knows both the Triton and the text side."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from llmops.errors import InputError, LlmopsError
from llmops.gateway.errors import ApiError, ModelNotFoundError, UnavailableError, log_detail
from llmops.gateway.fleet.refresher import Refresher
from llmops.gateway.fleet.serving import ServedModel, Standing
from llmops.gateway.messages import Engine, EngineRequest, ModelCard, Sampling
from llmops.gateway.settings import GatewaySettings, ModelOverrides
from llmops.gateway.text.template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.card import parse_card
from llmops.gateway.triton.client import ENGINE_SUFFIX, TritonClient
from llmops.gateway.triton.request_stream import RequestStreams
from llmops.gateway.triton.step_stream import StepStreams

log = logging.getLogger(__name__)


# a model that is broken is looked at again after so long, or when its card changes (s)
RETRY_SECONDS = 30.0


class PartError(LlmopsError):
    """A part of a model cannot be used; `fault` says which, the message also why."""

    def __init__(self, fault: str, why: Exception) -> None:
        super().__init__(f"{fault}: {str(why) or repr(why)}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a model cannot be served, as long as it has this card and until that time (monotonic seconds)."""

    card: str
    problem: str
    until: float


class ModelRegistry:
    """Watches one Triton server. A model stays known while Triton is away, so that requests get 503 and not 404."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._client: TritonClient | None = None
        self._bases: dict[str, ServedModel] = {}
        self._models: dict[str, ServedModel] = {}
        self._ready: frozenset[str] = frozenset()
        self._waiting: dict[str, str] = {}
        self._faults: dict[str, Fault] = {}
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

    def problems(self) -> dict[str, str]:
        """The models that cannot serve, and why, in one sentence each."""
        missing = {name: _not_ready(name) for name in sorted(set(self._bases) - self._ready)}
        return {**missing, **self._waiting}

    async def look(self) -> Standing:
        """How Triton and its models stand now."""
        if not await self._triton.server_ready():
            return Standing(problem="Triton is not ready.")
        await self.refresh()
        ready = {name: model.parent or name for name, model in self._models.items() if self.is_ready(name)}
        return Standing(ready, self.problems(), self._problem)

    async def generates(self, name: str, seconds: float) -> str | None:
        """None when the model has just made a token within `seconds`; otherwise why it has not."""
        try:
            await asyncio.wait_for(_make_one_token(self._bases[name]), seconds)
        except asyncio.TimeoutError:
            return f"The model {name} made no token within {seconds:g} s."
        except ApiError as error:
            log_detail(error, f"model {name}, asked for a token")
            return f"The model {name} cannot generate: {error.message}"
        return None

    async def refresh(self) -> None:
        """Read Triton's models and cards anew. Problems are kept for the answers, and logged once."""
        try:
            async with self._reading:
                await self._read_models()
        except Exception as error:  # noqa: BLE001  a bug must not stop what is served
            self._ready = frozenset()
            self._tell(error)
        else:
            self._problem = None

    def _tell(self, error: Exception) -> None:
        known = error.message if isinstance(error, ApiError) else "The gateway cannot read Triton's models."
        if known != self._problem:
            said = error.told if isinstance(error, ApiError) else known
            log.warning("%s", said, exc_info=None if isinstance(error, ApiError) else error)
        self._problem = known

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
        served = {named.get(one, one.removesuffix(ENGINE_SUFFIX)): one for one in engine_models}
        waiting = {}
        for name, engine_model in served.items():
            problem = await self._load(name, engine_model) if engine_models[engine_model] else _not_ready(name)
            if problem is not None:
                waiting[name] = problem
        self._forget(set(self._bases) - set(served))
        self._faults = {name: fault for name, fault in self._faults.items() if name in served}
        self._ready, self._waiting = frozenset(set(self._bases) - set(waiting)), waiting
        self._models = {model.name: model for base in self._bases.values() for model in _with_adapters(base)}

    async def _load(self, name: str, engine_model: str) -> str | None:
        """Make the model servable, anew when its card has changed. Returns what is wrong with it, if anything is.

        Whatever it is, it is this model's: the others are served.
        """
        try:
            text = await self._triton.card_text(engine_model)
        except UnavailableError as error:
            return self._say(name, _not_ready(name), error.told)
        fault = self._faults.get(name)
        if fault is not None and fault.card == text and monotonic() < fault.until:
            return fault.problem
        try:
            await self._renew(name, engine_model, text)
        except Exception as error:  # noqa: BLE001  files of others are read here: anything can be wrong with them
            self._forget({name} & set(self._bases))
            problem = f"The model {name} cannot be served: {_public(error)}"
            self._faults[name] = Fault(text, problem, monotonic() + RETRY_SECONDS)
            return self._say(name, problem, str(error) or repr(error), error)
        self._faults.pop(name, None)
        return None

    def _say(self, name: str, problem: str, detail: str, error: Exception | None = None) -> str:
        """Log a problem when it is new; a traceback only where nobody expected it."""
        if self._waiting.get(name) != problem:
            bug = error is not None and not isinstance(error, LlmopsError)
            log.warning("%s (%s)", problem, detail, exc_info=error if bug else None)
        return problem

    async def _renew(self, name: str, engine_model: str, text: str) -> None:
        overrides = self._settings.models.get(name, ModelOverrides())
        card = parse_card(text, {"name": name, **overrides.card_fields()})
        if name in self._bases and self._bases[name].card == card:
            return
        model = await asyncio.to_thread(self._assemble, card, engine_model)
        self._forget({name} & set(self._bases))
        self._bases[name] = model
        log.info("serving model %s (target %s, %d tokens of context)", name, card.target, card.max_seq_len)

    def _forget(self, names: set[str]) -> None:
        """Models that went, changed or broke. Their open streams may end, so their engines are closed at the end."""
        for name in names:
            self._retired.append(self._bases.pop(name).engine)

    def _assemble(self, card: ModelCard, engine_model: str) -> ServedModel:
        with _part("its tokenizer cannot be read"):
            tokenizer = TextTokenizer(Path(card.tokenizer_dir))
        with _part("its chat template cannot be used"):
            template = self._template(tokenizer, card.name)
        transport = StepStreams if StepStreams.name in card.transports else RequestStreams
        engine = transport(self._triton.start_call, engine_model, card)
        return ServedModel(card.name, card, tokenizer, template, engine)

    def _template(self, tokenizer: TextTokenizer, name: str) -> ChatTemplate | None:
        if tokenizer.chat_template is None:
            return None
        meant = self._settings.models.get(name, ModelOverrides()).control_tokens_in_messages
        return ChatTemplate(
            tokenizer.chat_template,
            tokenizer.special_tokens,
            seconds=self._settings.limits.template_seconds,
            controls=None if meant else tokenizer.keep_controls_apart(),
        )


@contextmanager
def _part(fault: str) -> Iterator[None]:
    """Raises PartError for whatever goes wrong with one part of a model; the rest of the text may name files."""
    try:
        yield
    except Exception as error:
        raise PartError(fault, error) from error


def _public(error: Exception) -> str:
    """What a client may hear: an error in the card says what it is, everything else only where."""
    if isinstance(error, PartError):
        return f"{error.fault}; the gateway's log says why."
    if isinstance(error, InputError):
        return f"{error.message}."
    return "the gateway failed on it; its log says why."


def _not_ready(name: str) -> str:
    return f"The model {name} is not ready."


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
