"""A model of an engine's step time, fitted to a window of observed steps.

The code is pure: it uses neither a clock nor I/O.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Observations that a fit looks at: a change of the engine's speed is learnt within about ten
#: seconds.
OBSERVATION_WINDOW = 96
#: New observations between two fits, once there are as many. Before that, each doubling is followed
#: by a fit.
FIT_INTERVAL = 32
#: Passes of reweighted least squares, which approach the least absolute deviation.
REWEIGHTING_PASSES = 4
#: Multiple of its expected duration that an observation counts for at most.
OUTLIER_FACTOR = 3.0
#: Weight of the ridge penalty, which keeps what the window says nothing of, such as prompts while
#: none comes.
RIDGE_WEIGHT = 1e-4


class FittedStepTimeModel:
    """A fitted linear model of the seconds that an engine step takes.

    The model is `a + b · batch + c · context + d · prompt tokens`, without a negative coefficient.

    The fit minimises absolute relative errors, so a single outlier moves it no more than any other
    observation does.
    """

    def __init__(self) -> None:
        self.coefficients = (0.0, 0.0, 0.0, 0.0)
        self._rows = np.zeros((OBSERVATION_WINDOW, 5))
        self._rows[:, 0] = 1.0
        self._count = 0
        self._next_fit = 1

    def __bool__(self) -> bool:
        """Return True once anything was observed."""
        return self._count > 0

    def start(self, seconds_per_prompt_token: float) -> None:
        """Assume `seconds_per_prompt_token` until steps have been observed.

        The time of a first prompt is then not mistaken for the time of every step.
        """
        if not self:
            self.coefficients = (0.0, 0.0, 0.0, seconds_per_prompt_token)

    def add(self, batch: float, context: float, prompt_tokens: float, seconds: float) -> None:
        """Add an observation: means per step over one or more steps.

        Args:
            batch: Sequences that got a token.
            context: Tokens that all of these sequences together had in the cache.
            prompt_tokens: Tokens of prompts that were read.
            seconds: Duration of a step.
        """
        self._rows[self._count % OBSERVATION_WINDOW, 1:] = (batch, context, prompt_tokens, max(seconds, 1e-6))
        self._count += 1
        if self._count >= self._next_fit:
            self._next_fit = self._count + min(self._count, FIT_INTERVAL)
            self._fit()

    def seconds(self, batch: float, context: float, prompt_tokens: float) -> float:
        """Return the expected duration of a step. Arguments as for `add`."""
        a, b, c, d = self.coefficients
        return a + b * batch + c * context + d * prompt_tokens

    def _fit(self) -> None:
        known = self._rows[: min(self._count, OBSERVATION_WINDOW)]
        # relative errors: each row and its target are divided by the target
        rows = known[:, :4] / known[:, 4:]
        scale = np.maximum(rows.max(axis=0), 1e-12)
        rows = rows / scale
        weights = np.ones(len(rows))
        before = np.array(self.coefficients) * scale
        found = before
        for _ in range(REWEIGHTING_PASSES):
            found = _solve_non_negative(rows.T * weights @ rows, rows.T @ weights, before)
            weights = 1 / np.maximum(np.abs(rows @ found - 1), 0.05)
            weights /= weights.mean()
        # from the median to the mean, to which a long step adds no more than `OUTLIER_FACTOR`
        found *= float(np.minimum(1 / np.maximum(rows @ found, 1e-6), OUTLIER_FACTOR).mean())
        a, b, c, d = (found / scale).tolist()
        self.coefficients = (a, b, c, d)


def _solve_non_negative(matrix: NDArray, target: NDArray, before: NDArray) -> NDArray:
    """Solve the normal equations with a ridge towards `before`; negative coefficients become 0."""
    used = np.ones(len(target), dtype=bool)
    ridge = RIDGE_WEIGHT * np.diag(matrix) + 1e-12
    matrix, target = matrix + np.diag(ridge), target + ridge * before
    while True:
        found = np.linalg.solve(matrix[np.ix_(used, used)], target[used])
        if not len(found) or found.min() >= 0:
            break
        used[np.flatnonzero(used)[found.argmin()]] = False
    solution: NDArray = np.zeros(len(target))
    solution[used] = found
    return solution
