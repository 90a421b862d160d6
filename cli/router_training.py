"""The training of the head with which an alias chooses between two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmops.cli.filter_evaluation import HELD_OUT, Example, logistic_regression
from llmops.errors import InputError
from llmops.gateway.routing.auto_model import LARGE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Minimum number of examples of each model. Fewer leave too few held-back examples to report on.
MIN_EXAMPLES = 8


@dataclass(frozen=True)
class RouterReport:
    """The results of a head on examples that it was not trained on.

    Attributes:
        small_kept: The number of easy texts that go to the small model.
        small_raised: The number of easy texts that go to the large model.
        large_missed: The number of hard texts that go to the small model.
        large_found: The number of hard texts that go to the large model.
    """

    small_kept: int
    small_raised: int
    large_missed: int
    large_found: int

    @property
    def accuracy(self) -> float:
        """Return the share of texts that go to the right model."""
        return (self.small_kept + self.large_found) / self._total

    def saved(self, price: float) -> float:
        """Return the saved share of the cost of sending everything to the large model.

        `price` is the price of the small model as a share of the large one's.
        """
        return (1 - price) * (self.small_kept + self.large_missed) / self._total

    @property
    def _total(self) -> int:
        return self.small_kept + self.small_raised + self.large_missed + self.large_found


def train_router(
    examples: Sequence[Example], model: str, vectors: NDArray[np.float32], *, max_missed: float
) -> tuple[dict[str, Any], RouterReport]:
    """Fit a head on the vectors of labelled texts.

    Args:
        examples: Texts, of category `large` if the small model does not answer them well.
        model: The name of the embedding model.
        vectors: The vectors FP32 [len(examples), dimensions].
        max_missed: The share of hard texts that may go to the small model. The threshold follows
            from it.

    Returns:
        The head as `read_head` reads it, and its results on the texts that were held back.

    Raises:
        InputError: There are too few examples, or examples with another category than `large`.
    """
    import numpy as np

    if unknown := sorted({example.category for example in examples} - {"", "small", LARGE}):
        raise InputError(
            f"The category {unknown[0]!r} is not a model; write large, or no category for the small model."
        )
    is_large = np.array([example.category == LARGE for example in examples])
    for name, count in ((LARGE, int(is_large.sum())), ("small", int((~is_large).sum()))):
        if count < MIN_EXAMPLES:
            raise InputError(
                f"Too few examples for the {name} model: {count}, where at least {MIN_EXAMPLES} are needed; add more."
            )
    # hold back the same share of easy and hard texts, so that a report has both kinds
    order = np.random.default_rng(0).permutation(len(examples))
    held = np.zeros(len(examples), dtype=bool)
    for kind in (True, False):
        own = order[is_large[order] == kind]
        held[own[: max(2, int(len(own) * HELD_OUT))]] = True
    weights = logistic_regression(np.asarray(vectors[~held], dtype=np.float64), is_large[~held])
    scores = 1 / (1 + np.exp(-(vectors[held] @ weights[:-1] + weights[-1])))
    threshold = float(np.quantile(scores[is_large[held]], max_missed, method="lower"))
    raised, hard = scores >= threshold, is_large[held]
    cells = [(False, False), (False, True), (True, False), (True, True)]
    report = RouterReport(*(int(np.sum((hard == is_hard) & (raised == is_raised))) for is_hard, is_raised in cells))
    head = {"model": model, "weights": {LARGE: [float(value) for value in weights]}, "thresholds": {LARGE: threshold}}
    return head, report
