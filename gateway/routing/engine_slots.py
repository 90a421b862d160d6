"""The limit of sequences per engine: the slots of its batch, and `limits.queued` further slots.

This limit counts the requests of all callers to a model. The quotas of `ratelimit/` limit single
callers, also for one model (`Quotas.models`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from llmops.gateway.errors import OverloadedError
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.routing.served_models import GenerativeModel

#: Range of Retry-After in seconds, so that rejected clients do not all return at once.
RETRY_AFTER_RANGE = (1.0, 4.0)


class EngineSlots:
    """The slots of all engines. Adapters share the slots of their base model's engine."""

    def __init__(self, queued: int) -> None:
        """Create slots for each engine's batch, and `queued` further slots per engine.

        One client cannot take all of the `queued` slots; see FairShares.
        """
        self._queued = queued
        self._engines: dict[tuple[str, str], FairShares] = {}

    def enter(self, model: GenerativeModel, sequences: int, caller: str) -> Callable[[], None]:
        """Take slots for a request.

        Args:
            model: The model that generates.
            sequences: Number of sequences that the request generates.
            caller: Key of the caller's fair share, `Caller.share`.

        Returns:
            A function that releases the slots. It may be called more than once.

        Raises:
            OverloadedError: The queue, or the caller's share of the queue, is full. A request
                that finds the queue empty always fits.
        """
        name = (model.parent or model.name, model.version)
        slots = self._engines.get(name) or self._engines.setdefault(name, FairShares(self._queued))
        slots.free = model.card.max_batch_size if slots.taken else sequences
        if not slots.take(caller, sequences):
            message = _queue_full_message(model, slots.taken, self._queued)
            raise OverloadedError(message, retry_after=random.uniform(*RETRY_AFTER_RANGE))
        is_released = False

        def release() -> None:
            nonlocal is_released
            if not is_released:
                is_released = True
                slots.give_back(caller, sequences)

        return release


def _queue_full_message(model: GenerativeModel, taken: int, queued: int) -> str:
    which = "its maximum" if taken >= model.card.max_batch_size + queued else "to which one client may not add more"
    return f"The model '{model.name}' has {taken} answers in progress or waiting, {which}; try again later."
