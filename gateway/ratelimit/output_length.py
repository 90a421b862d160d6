"""An estimate of the length of answers whose client sets no maximum, for each caller."""

from __future__ import annotations

from collections import OrderedDict

from llmops.quantile_window import QuantileWindow

#: The estimate in tokens for a caller without any answers of a model yet.
INITIAL_TOKENS = 256
#: Answers of a model to a caller on which an estimate is based.
WINDOW = 200
#: The quantile of the lengths that is reserved: most answers stay below it.
QUANTILE = 0.9
#: Estimates that are kept; the one noted longest ago is forgotten first.
MAX_ESTIMATES = 2000


class OutputLengthEstimate:
    """The 90th percentile of the lengths of a model's last answers to each caller, in tokens.

    Only answers that the model itself ended are counted. Callers do not share an estimate: long
    answers of one would have others reserve as much, who then get less than their quotas allow.
    """

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str], QuantileWindow] = OrderedDict()

    def of(self, model: str, caller: str = "") -> int:
        """Return the estimate of an answer of `model` to `caller`, in tokens."""
        known = self._answers.get((caller, model))
        length = known.quantile(QUANTILE) if known is not None else None
        return INITIAL_TOKENS if length is None else int(length)

    def note(self, model: str, tokens: int, caller: str = "") -> None:
        """Record the length of an answer, in tokens."""
        lengths = self._answers.setdefault((caller, model), QuantileWindow(WINDOW))
        self._answers.move_to_end((caller, model))
        if len(self._answers) > MAX_ESTIMATES:
            self._answers.popitem(last=False)
        lengths.add(tokens)
