"""Whether an answer was a good one: complete, and within the model's objectives. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

# good; first token too late; tokens too slow; broken by engine or gateway; refused for want of a place; the client left
GoodputOutcome = Literal["good", "late", "slow", "failed", "shed", "aborted"]
GOODPUT_OUTCOMES: tuple[GoodputOutcome, ...] = get_args(GoodputOutcome)


class LatencyObjectives(NamedTuple):
    """Seconds to the first token and per token after it; None is no objective."""

    ttft: float | None = None
    tpot: float | None = None

    def judge(self, ttft: float, tpot: float | None, *, left: bool) -> GoodputOutcome:
        """Of an answer, or of the part of one whose client has `left`: who has been waiting for too long did not
        leave a good answer. `ttft` is the wait so far where nothing came; `tpot` None for less than two tokens."""
        if self.ttft is not None and ttft > self.ttft:
            return "late"
        if self.tpot is not None and tpot is not None and tpot > self.tpot:
            return "slow"
        return "aborted" if left else "good"
