"""How many sequences may be on their way at once, per engine: those of its batch and a bounded queue behind them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from llmops.gateway.errors import UnavailableError
from llmops.gateway.fleet.serving import ServedModel

# Seconds after which a client is to come back: spread, or all that were refused would come back at once.
RETRY_AFTER = (1.0, 4.0)


class Queues:
    """This worker's sequences, those of an adapter with its base model's: they share the engine."""

    def __init__(self, queued: int) -> None:
        """`queued`: how many may wait beyond an engine's batch."""
        self._queued = queued
        self._sequences: Counter[str] = Counter()

    def enter(self, model: ServedModel, sequences: int) -> Callable[[], None]:
        """Take the places of a request; what is returned gives them back, and may be called again.

        Raises UnavailableError when the queue is full. A request alone is never too many for it.
        """
        engine = model.parent or model.name
        taken = self._sequences[engine]
        if taken and taken + sequences > model.card.max_batch_size + self._queued:
            raise UnavailableError(
                f"The model '{model.name}' has {taken} answers in progress or waiting, as many as it may; try again.",
                code="overloaded",
                retry_after=random.uniform(*RETRY_AFTER),
            )
        self._sequences[engine] += sequences
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._sequences[engine] -= sequences

        return leave
