"""An estimate of the length of answers whose client sets no maximum."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

#: The estimate in tokens for a model without any answers yet.
INITIAL_TOKENS = 256
#: Answers of a model on which its estimate is based.
WINDOW = 200
#: The quantile of the lengths that is reserved: most answers stay below it.
QUANTILE = 0.9


class OutputLengthEstimate:
    """The 90th percentile of the lengths of a model's last answers, in tokens.

    Only answers that the model itself ended are counted.
    """

    def __init__(self) -> None:
        self._models: dict[str, tuple[deque[int], list[int]]] = {}

    def of(self, model: str) -> int:
        """Return the estimate for `model`, in tokens."""
        lengths = self._models[model][1] if model in self._models else []
        return lengths[int(len(lengths) * QUANTILE)] if lengths else INITIAL_TOKENS

    def note(self, model: str, tokens: int) -> None:
        """Record the length of an answer, in tokens."""
        order, lengths = self._models.setdefault(model, (deque(), []))
        if len(order) == WINDOW:
            del lengths[bisect_left(lengths, order.popleft())]
        order.append(tokens)
        insort(lengths, tokens)
