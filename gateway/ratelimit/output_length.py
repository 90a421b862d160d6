"""An estimate of the length of answers, per caller, for requests without a maximum."""

from __future__ import annotations

from collections import OrderedDict

from llmops.quantile_window import QuantileWindow

#: Minimum of each estimate in tokens, also for a caller that has no answers of a model yet. Short
#: answers say little about the next ones, which the caller can make long.
MIN_TOKENS = 256
#: Number of a model's last answers to a caller that an estimate is based on.
WINDOW = 200
#: Quantile of the lengths that is reserved, so that most answers stay below their reservation.
QUANTILE = 0.9
#: Maximum number of estimates. Beyond it, the estimate that was updated longest ago is dropped.
MAX_ESTIMATES = 2000


class OutputLengthEstimate:
    """The 90th percentile of the lengths of a model's last answers to each caller, in tokens.

    The estimate is at least `MIN_TOKENS`. Only answers that the model itself ended are counted.
    Each caller has an estimate of its own: if callers shared an estimate, the long answers of one
    caller would make others reserve too much and get less than their quotas allow.
    """

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str], QuantileWindow] = OrderedDict()

    def of(self, model: str, caller: str = "") -> int:
        """Return the estimated length of an answer of `model` to `caller`, in tokens."""
        known = self._answers.get((caller, model))
        length = known.quantile(QUANTILE) if known is not None else None
        return max(MIN_TOKENS, int(length or 0))

    def note(self, model: str, tokens: int, caller: str = "") -> None:
        """Record the length of a complete answer, in tokens."""
        lengths = self._answers.setdefault((caller, model), QuantileWindow(WINDOW))
        self._answers.move_to_end((caller, model))
        if len(self._answers) > MAX_ESTIMATES:
            self._answers.popitem(last=False)
        lengths.add(tokens)
