"""How long an answer will be whose client does not say."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

# tokens, until a model has shown how long its answers are
INITIAL_TOKENS = 256
WINDOW = 200
QUANTILE = 0.9


class OutputLengthEstimate:
    """The 90th percentile of a model's last answers (tokens), of those that nothing but the model
    ended.
    """

    def __init__(self) -> None:
        self._models: dict[str, tuple[deque[int], list[int]]] = {}

    def of(self, model: str) -> int:
        lengths = self._models[model][1] if model in self._models else []
        return lengths[int(len(lengths) * QUANTILE)] if lengths else INITIAL_TOKENS

    def note(self, model: str, tokens: int) -> None:
        order, lengths = self._models.setdefault(model, (deque(), []))
        if len(order) == WINDOW:
            del lengths[bisect_left(lengths, order.popleft())]
        order.append(tokens)
        insort(lengths, tokens)
