"""The messages that cross the borders of this package.

A `Request` is sent, and a `Record` describes its answer.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Request:
    """A request for any client.

    It has either `messages` (chat) or `prompt` (text, or token ids for Triton).
    """

    max_tokens: int
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    cancel_after: int | None = None  # cancel after this many tokens
    keep_text: bool = False  # keep the text of the answer for the next turn


@dataclass(slots=True)
class Record:
    """The record of a request. Times are seconds on the load generator's monotonic clock.

    `chunks` has the arrival time of each message with tokens. `tokens_in` and `tokens_out` are the
    server's counts (`counted` false) or, if it sends none, the number of chunks (`counted` true).
    """

    start: float
    first: float | None = None
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    tokens_in: int | None = None
    tokens_out: int = 0
    counted: bool = True
    requested: int = 0
    finish: str | None = None
    error: str | None = None
    cancelled: bool = False
    overhead_ms: float | None = None
    lag: float = 0.0  # seconds between the scheduled and the real time of sending
    turn: int = 0
    text: str | None = None
    ids: list[int] | None = None
    tool_calls: int = 0
    tool_calls_valid: int = 0

    @property
    def ok(self) -> bool:
        """Return True if the request neither failed nor was cancelled by the load generator."""
        return self.error is None and not self.cancelled

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.start

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Return the mean time per output token after the first, or None for fewer than two tokens."""
        if self.first is None or self.tokens_out < 2:
            return None
        return (self.chunks[-1] - self.first) / (self.tokens_out - 1)

    @property
    def gaps(self) -> list[float]:
        """Return the inter-token latencies: gaps between successive messages with tokens."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    def to_json(self, origin: float) -> dict[str, Any]:
        """Return the record relative to `origin`, in microseconds and without the text."""
        data = asdict(self)
        for name in ("start", "first", "end"):
            data[name] = None if data[name] is None else round(data[name] - origin, 6)
        data["chunks"] = [round(t - origin, 6) for t in self.chunks]
        data["lag"] = round(self.lag, 6)
        del data["text"], data["ids"]
        return data


def percentile(ordered: list[float], p: float) -> float:
    """Return the p-th percentile of sorted values, interpolated linearly like numpy's default."""
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
