"""How many sequences may be on their way at once, per engine: those of its batch and a bounded queue behind them."""

from __future__ import annotations

import random
from collections.abc import Callable

from llmops.gateway.errors import UnavailableError
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.routing.served_models import GenerativeModel

# Seconds after which a client is to come back: spread, or all that were refused would come back at once.
RETRY_AFTER_RANGE = (1.0, 4.0)


class EngineSlots:
    """This worker's sequences, those of an adapter with its base model's: they share the engine."""

    def __init__(self, queued: int) -> None:
        """`queued`: how many may wait beyond an engine's batch, of which no client gets all."""
        self._queued = queued
        self._engines: dict[str, FairShares] = {}

    def enter(self, model: GenerativeModel, sequences: int, caller: str) -> Callable[[], None]:
        """Take the places of a request of `caller`, `a/b` for `b` of `a`; what is returned gives them back, and may be
        called again.

        Raises UnavailableError when the queue is full, or the caller's share of it. A request alone is never too many.
        """
        name = model.parent or model.name
        places = self._engines.get(name) or self._engines.setdefault(name, FairShares(self._queued))
        places.free = model.card.max_batch_size if places.taken else sequences
        if not places.take(caller, sequences):
            raise UnavailableError(
                _queue_full_message(model, places.taken, self._queued),
                code="overloaded",
                retry_after=_random_retry_after(),
            )
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                places.give_back(caller, sequences)

        return leave


def _queue_full_message(model: GenerativeModel, taken: int, queued: int) -> str:
    which = "as many as it may" if taken >= model.card.max_batch_size + queued else "as many as one client may add to"
    return f"The model '{model.name}' has {taken} answers in progress or waiting, {which}; try again."


def _random_retry_after() -> float:
    return random.uniform(*RETRY_AFTER_RANGE)
