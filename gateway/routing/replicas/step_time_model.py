"""A model of an engine's step time, fitted to a window of observed steps.

The code is pure: it uses neither a clock nor I/O.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Number of observations in a fit, few enough that a change of the engine's speed is learnt within
#: about ten seconds.
OBSERVATION_WINDOW = 96
#: Number of new observations between two fits. Before the window has as many, the model is fitted
#: each time that their number doubles.
FIT_INTERVAL = 32
#: Number of passes of reweighted least squares, after which the fit is close to the least absolute
#: deviation.
REWEIGHTING_PASSES = 4
#: Multiple of the expected duration up to which an observation counts, so that a step that was held
#: up does not distort the fit.
OUTLIER_FACTOR = 3.0
#: Weight of the ridge penalty, which keeps coefficients that the window tells nothing about, such
#: as the time per prompt token while no prompts arrive.
RIDGE_WEIGHT = 1e-4


class FittedStepTimeModel:
    """A fitted linear model of the seconds that an engine step takes.

    The model is `a + b · batch + c · context + d · prompt tokens`, in which no coefficient is
    negative. The fit minimises absolute relative errors, so that an outlier has no more influence
    than any other observation.
    """

    def __init__(self) -> None:
        self.coefficients = (0.0, 0.0, 0.0, 0.0)
        self._rows = np.zeros((OBSERVATION_WINDOW, 5))
        self._rows[:, 0] = 1.0
        self._count = 0
        self._next_fit = 1

    def __bool__(self) -> bool:
        """Return True if the model has an observation."""
        return self._count > 0

    def start(self, seconds_per_prompt_token: float) -> None:
        """Assume `seconds_per_prompt_token` until steps have been observed.

        Otherwise, the time of the first prompt would be taken for the time of every step.
        """
        if not self:
            self.coefficients = (0.0, 0.0, 0.0, seconds_per_prompt_token)

    def add(self, batch: float, context: float, prompt_tokens: float, seconds: float) -> None:
        """Add an observation of the mean per step over one or more steps.

        Args:
            batch: Number of sequences that got a token.
            context: Number of tokens in the cache of all these sequences together.
            prompt_tokens: Number of prompt tokens that were computed.
            seconds: Duration of a step.
        """
        self._rows[self._count % OBSERVATION_WINDOW, 1:] = (batch, context, prompt_tokens, max(seconds, 1e-6))
        self._count += 1
        if self._count >= self._next_fit:
            self._next_fit = self._count + min(self._count, FIT_INTERVAL)
            self._fit()

    def seconds(self, batch: float, context: float, prompt_tokens: float) -> float:
        """Return the expected duration of a step in seconds. See `add` for the arguments."""
        a, b, c, d = self.coefficients
        return a + b * batch + c * context + d * prompt_tokens

    def _fit(self) -> None:
        known = self._rows[: min(self._count, OBSERVATION_WINDOW)]
        # for relative errors, divide each row and its target by the target
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
        # Correct the median to the mean. A long step adds no more than `OUTLIER_FACTOR` times its
        # expected duration.
        found *= float(np.minimum(1 / np.maximum(rows @ found, 1e-6), OUTLIER_FACTOR).mean())
        a, b, c, d = (found / scale).tolist()
        self.coefficients = (a, b, c, d)


def _solve_non_negative(matrix: NDArray, target: NDArray, before: NDArray) -> NDArray:
    """Return non-negative coefficients that solve the normal equations, with a ridge penalty.

    Args:
        matrix: The matrix of the normal equations.
        target: The right-hand side of the normal equations.
        before: The coefficients that the ridge penalty pulls the solution towards.
    """
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
