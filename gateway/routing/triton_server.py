"""One Triton server: which models are on it, which are ready, and what is wrong with the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from llmops.errors import InputError, LlmopsError
from llmops.gateway.errors import ApiError, UnavailableError
from llmops.gateway.routing.model_kinds import ModelKind, ModelLoadError
from llmops.gateway.routing.served_models import Model
from llmops.gateway.triton.grpc_client import TritonClient

log = logging.getLogger(__name__)

# a model that is broken is looked at again after so long, or when its card changes (s)
RELOAD_INTERVAL = 30.0


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model on a server, under Triton's name and the one it is served under."""

    triton_name: str
    name: str
    kind: ModelKind[Any]


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a model cannot be served, as long as it has this card and until that time (monotonic seconds)."""

    card: str
    problem: str
    until: float


class ModelServer:
    """Its models stay known while it is away, so that requests get 503 and not 404."""

    def __init__(self, address: str, kinds: Sequence[ModelKind[Any]], timeout: float, name: str = "") -> None:
        """`address` is HOST:PORT of its gRPC endpoint, `timeout` what a question to it may take (s); `name` tells it
        from others with the same address."""
        self.address, self.name = address, name or address
        self.models: Mapping[OfferedModel, Model] = {}
        self.problem: str | None = "The gateway has not reached Triton yet."
        self._kinds, self._timeout = kinds, timeout
        self._client: TritonClient | None = None
        self._ready: frozenset[OfferedModel] = frozenset()
        self._waiting: dict[OfferedModel, str] = {}
        self._faults: dict[OfferedModel, LoadFailure] = {}
        self._retired: list[Model] = []
        self._reading = asyncio.Lock()

    @property
    def _triton(self) -> TritonClient:
        assert self._client is not None, "start() was not called"
        return self._client

    def start(self) -> None:
        """Must be called in the event loop that will look."""
        self._client = TritonClient(self.address, timeout=self._timeout)

    async def close(self) -> None:
        for model in [*self._retired, *self.models.values()]:
            await model.close()
        if self._client is not None:
            await self._client.close()

    def is_ready(self, offer: OfferedModel) -> bool:
        """Whether it could serve at the last look."""
        return offer in self._ready

    def problems(self) -> dict[OfferedModel, str]:
        """The models that cannot serve, known ones first, and why, in one sentence each."""
        missing = sorted(set(self.models) - self._ready, key=lambda offer: offer.name)
        return {**{offer: _not_ready_message(offer) for offer in missing}, **self._waiting}

    async def answers(self) -> bool:
        """Whether it says now that it is ready."""
        return await self._triton.server_ready()

    async def look(self) -> None:
        """Read its models and cards anew. Problems are kept for the answers, and logged once."""
        try:
            async with self._reading:
                await self._read()
        except Exception as error:  # noqa: BLE001  a bug must not stop what is served
            self._ready = frozenset()
            self._tell(error)
        else:
            self.problem = None

    def _tell(self, error: Exception) -> None:
        known = error.message if isinstance(error, ApiError) else "The gateway cannot read Triton's models."
        if known != self.problem:
            said = error.told if isinstance(error, ApiError) else known
            log.warning("%s", said, exc_info=None if isinstance(error, ApiError) else error)
        self.problem = known

    async def _read(self) -> None:
        loaded = await self._triton.index()
        offers = [OfferedModel(one, name, kind) for kind in self._kinds for one, name in kind.served(loaded).items()]
        waiting: dict[OfferedModel, str] = {}
        for offer in offers:
            problem = await self._load(offer) if await self._is_up(offer, loaded) else _not_ready_message(offer)
            if problem is not None:
                waiting[offer] = problem
        self._forget(set(self.models) - set(offers))
        self._faults = {offer: fault for offer, fault in self._faults.items() if offer in offers}
        self._ready, self._waiting = frozenset(set(self.models) - set(waiting)), waiting

    async def _is_up(self, offer: OfferedModel, loaded: Mapping[str, bool]) -> bool:
        """The index says whether a model is loaded; one whose engine has ended says so when it is asked itself."""
        return loaded.get(offer.triton_name, True) and await self._triton.model_ready(offer.triton_name)

    async def _load(self, offer: OfferedModel) -> str | None:
        """Make the model servable, anew when its card has changed. Returns what is wrong with it, if anything is.

        Whatever it is, it is this model's: the others are served.
        """
        try:
            text = await self._triton.card_text(offer.triton_name)
        except UnavailableError as error:
            return self._say(offer, _not_ready_message(offer), error.told)
        fault = self._faults.get(offer)
        if fault is not None and fault.card == text and monotonic() < fault.until:
            return fault.problem
        try:
            await self._renew(offer, text)
        except Exception as error:  # noqa: BLE001  files of others are read here: anything can be wrong with them
            self._forget({offer})
            problem = f"The model {offer.name} cannot be served: {_client_message(error)}"
            self._faults[offer] = LoadFailure(text, problem, monotonic() + RELOAD_INTERVAL)
            return self._say(offer, problem, str(error) or repr(error), error)
        self._faults.pop(offer, None)
        return None

    def _say(self, offer: OfferedModel, problem: str, detail: str, error: Exception | None = None) -> str:
        """Log a problem when it is new; a traceback only where nobody expected it."""
        if self._waiting.get(offer) != problem:
            bug = error is not None and not isinstance(error, LlmopsError)
            log.warning("%s (%s)", problem, detail, exc_info=error if bug else None)
        return problem

    async def _renew(self, offer: OfferedModel, text: str) -> None:
        card = offer.kind.read_card(text, offer.name)
        known = self.models.get(offer)
        if known is not None and known.card == card:
            return
        model = await asyncio.to_thread(offer.kind.make, card, self._triton, offer.triton_name)
        self._forget({offer})
        self.models = {**self.models, offer: model}
        log.info("serving model %s (target %s, %d tokens of context)", offer.name, card.target, card.max_seq_len)

    def _forget(self, offers: set[OfferedModel]) -> None:
        """Models that went, changed or broke. Their open streams may end, so they are closed at the end."""
        self._retired += [model for offer, model in self.models.items() if offer in offers]
        self.models = {offer: model for offer, model in self.models.items() if offer not in offers}


def _client_message(error: Exception) -> str:
    """What a client may hear: an error in the card says what it is, everything else only where."""
    if isinstance(error, ModelLoadError):
        return f"{error.fault}; the gateway's log says why."
    if isinstance(error, InputError):
        return f"{error.message}."
    return "the gateway failed on it; its log says why."


def _not_ready_message(offer: OfferedModel) -> str:
    return f"The model {offer.name} is not ready."
