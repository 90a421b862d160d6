"""Step times of simulated engines that follow a simple rule."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearStepTimes:
    """Linear step times.

    A step costs a time of its own, and a time per sequence, per prompt token and per cached token.
    """

    step: float = 0.01
    sequence: float = 0.0
    prompt_token: float = 0.00005
    cached_token: float = 0.0

    def decode(self, batch: int, length: float) -> float:
        return self.step + batch * (self.sequence + length * self.cached_token)

    def read(self, batch: int, length: float, tokens: int, before: int) -> float:
        return self.decode(batch, length) + tokens * self.prompt_token
