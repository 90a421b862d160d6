"""A Triton server: its models, which of them are ready, and the problems of the others."""

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

#: Seconds after which a broken model is loaded again, even if its metadata has not changed.
RELOAD_INTERVAL = 30.0
#: Minimum pause before a broken model is loaded again, as a multiple of the duration of the last
#: attempt: reading a tokenizer of 35 MB holds the GIL, and delays all callers, for a second.
RELOAD_PAUSE = 100.0
#: Maximum pause in seconds before a broken model is loaded again, so that a file system that hung
#: once does not keep a repaired model away for longer.
MAX_RELOAD_INTERVAL = 600.0


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model on a server: its name in Triton, and the name under which it is served."""

    triton_name: str
    name: str
    kind: ModelKind[Any]


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The problem of a model with this metadata, until a time in monotonic seconds."""

    metadata: str
    problem: str
    until: float


class ModelServer:
    """A Triton server and its models.

    The models remain known while the server cannot be reached, so that requests get 503 and not
    404.
    """

    def __init__(self, address: str, kinds: Sequence[ModelKind[Any]], timeout: float, name: str = "") -> None:
        """Create a server that is not connected yet.

        Args:
            address: HOST:PORT of the gRPC endpoint.
            kinds: The kinds of models to recognise.
            timeout: Maximum seconds for an answer of the server.
            name: Name that distinguishes the server from others with the same address.
        """
        self.address, self.name = address, name or address
        self.models: Mapping[OfferedModel, Model] = {}
        self.problem: str | None = "The gateway has not reached Triton yet; try again later."
        self._kinds, self._timeout = kinds, timeout
        self._client: TritonClient | None = None
        self._ready: frozenset[OfferedModel] = frozenset()
        self._not_ready: dict[OfferedModel, str] = {}
        self._failures: dict[OfferedModel, LoadFailure] = {}
        # Parsed metadata of models, kept because parsing it at each refresh takes a tenth of the
        # CPU time of an idle gateway.
        self._loaded_metadata: dict[OfferedModel, str] = {}
        self._retired: list[Model] = []
        self._refreshing = asyncio.Lock()

    @property
    def _triton(self) -> TritonClient:
        assert self._client is not None, "start() was not called"
        return self._client

    def start(self) -> None:
        """Connect. Must be called in the event loop that runs `refresh`."""
        self._client = TritonClient(self.address, timeout=self._timeout)

    async def close(self) -> None:
        for model in [*self._retired, *self.models.values()]:
            await model.close()
        if self._client is not None:
            await self._client.close()

    def is_ready(self, offer: OfferedModel) -> bool:
        """Return True if the model could serve at the latest refresh."""
        return offer in self._ready

    def problems(self) -> dict[OfferedModel, str]:
        """Return the models that cannot serve, each with the reason as one sentence.

        Models that are known come first.
        """
        missing = sorted(set(self.models) - self._ready, key=lambda offer: offer.name)
        return {**{offer: _not_ready_message(offer) for offer in missing}, **self._not_ready}

    async def answers(self) -> bool:
        """Return True if the server now answers that it is ready."""
        return await self._triton.server_ready()

    async def refresh(self) -> bool:
        """Read the models and their metadata again. Return True if something changed.

        A problem is kept for clients, and logged once.
        """
        before = self._served()
        try:
            async with self._refreshing:
                await self._read_models()
        except Exception as error:  # noqa: BLE001  a bug must not stop what is served
            self._ready = frozenset()
            self._set_problem(error)
        else:
            self.problem = None
        return self._served() != before

    def _served(self) -> tuple[object, ...]:
        # the object of a model is kept as long as its metadata does not change
        return {offer: id(model) for offer, model in self.models.items()}, self._ready, self._not_ready, self.problem

    def _set_problem(self, error: Exception) -> None:
        is_expected = isinstance(error, ApiError)
        problem = (
            error.message
            if isinstance(error, ApiError)
            else "The gateway cannot read Triton's models; the gateway's log says why."
        )
        if problem != self.problem:
            detail = error.full_message if isinstance(error, ApiError) else problem
            log.warning("%s", detail, exc_info=None if is_expected else error)
        self.problem = problem

    async def _read_models(self) -> None:
        loaded = await self._triton.index()
        offers = [OfferedModel(one, name, kind) for kind in self._kinds for one, name in kind.served(loaded).items()]
        not_ready: dict[OfferedModel, str] = {}
        for offer in offers:
            problem = await self._load(offer) if await self._is_up(offer, loaded) else _not_ready_message(offer)
            if problem is not None:
                not_ready[offer] = problem
        self._retire(set(self.models) - set(offers))
        self._failures = {offer: failure for offer, failure in self._failures.items() if offer in offers}
        self._ready, self._not_ready = frozenset(set(self.models) - set(not_ready)), not_ready

    async def _is_up(self, offer: OfferedModel, loaded: Mapping[str, bool]) -> bool:
        """Return True if Triton's index lists the model as loaded, and the model answers as ready.

        The engine of a loaded model may have ended.
        """
        return loaded.get(offer.triton_name, True) and await self._triton.model_ready(offer.triton_name)

    async def _load(self, offer: OfferedModel) -> str | None:
        """Load a model, or load it again if its metadata has changed.

        Returns:
            The problem of the model, or None. A problem concerns this model alone: the others are
                served.
        """
        try:
            text = await self._triton.metadata_text(offer.triton_name)
        except UnavailableError as error:
            return self._log_problem(offer, _not_ready_message(offer), error.full_message)
        failure = self._failures.get(offer)
        if failure is not None and failure.metadata == text and monotonic() < failure.until:
            return failure.problem
        begun = monotonic()
        try:
            await self._update_model(offer, text)
        except Exception as error:  # noqa: BLE001  files of others are read here: anything can be wrong with them
            self._retire({offer})
            problem = f"The model {offer.name} cannot be served: {_client_message(error)}"
            pause = min(max(RELOAD_INTERVAL, RELOAD_PAUSE * (monotonic() - begun)), MAX_RELOAD_INTERVAL)
            self._failures[offer] = LoadFailure(text, problem, monotonic() + pause)
            return self._log_problem(offer, problem, str(error) or repr(error), error)
        self._failures.pop(offer, None)
        return None

    def _log_problem(self, offer: OfferedModel, problem: str, detail: str, error: Exception | None = None) -> str:
        """Log a problem once, with a traceback only for an unexpected exception."""
        if self._not_ready.get(offer) != problem:
            is_bug = error is not None and not isinstance(error, LlmopsError)
            log.warning("%s (%s)", problem, detail, exc_info=error if is_bug else None)
        return problem

    async def _update_model(self, offer: OfferedModel, text: str) -> None:
        if offer in self.models and self._loaded_metadata[offer] == text:
            return
        card = offer.kind.read_card(text, offer.name)
        model = await asyncio.to_thread(offer.kind.make, card, self._triton, offer.triton_name)
        self._retire({offer})
        self.models, self._loaded_metadata[offer] = {**self.models, offer: model}, text
        log.info("Serving model %s (target %s, %d tokens of context)", offer.name, card.target, card.max_seq_len)

    def _retire(self, offers: set[OfferedModel]) -> None:
        """Retire models that were removed, changed or broken.

        Retired models are closed with the server, so that open streams can end.
        """
        self._retired += [model for offer, model in self.models.items() if offer in offers]
        self.models = {offer: model for offer, model in self.models.items() if offer not in offers}


def _client_message(error: Exception) -> str:
    """Return the part of an error that clients may see.

    Errors of metadata are shown in full. For all other errors, only the broken part is named.
    """
    if isinstance(error, ModelLoadError):
        return f"{error.fault}; the gateway's log says why."
    if isinstance(error, InputError):
        return f"{error.message}."
    return "the gateway could not load it; the gateway's log says why."


def _not_ready_message(offer: OfferedModel) -> str:
    return f"The model {offer.name} is not ready; try again later."
