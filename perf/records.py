"""The data that the packages in `perf` exchange: requests, and the records of their answers."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Request:
    """A request for a client of any protocol.

    Attributes:
        max_tokens: Maximum number of answer tokens.
        messages: The messages of a chat, or None.
        prompt: The prompt if there are no messages: text, or token ids for Triton.
        tools: Tool definitions in OpenAI's format, or None.
        cancel_after: Number of messages with tokens after which the client cancels, or None.
        keep_text: True to keep the answer's text for the next turn.
    """

    max_tokens: int
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    cancel_after: int | None = None
    keep_text: bool = False


@dataclass(slots=True)
class Record:
    """The record of a request. Times are seconds on the load generator's monotonic clock.

    Attributes:
        start: The time from which latencies count.
        first: The arrival of the first token, or None.
        end: The end of the answer.
        chunks: The arrival time of each message with tokens.
        tokens_in: The server's count of prompt tokens, or None.
        tokens_out: The server's count of answer tokens, or the number of chunks.
        counted: True if `tokens_out` is the number of chunks, because the server sent no count.
        requested: The maximum number of answer tokens that was requested.
        finish: The finish reason, or None.
        error: The kind of failure, or None.
        cancelled: True if the load generator cancelled the request on purpose.
        overhead_ms: The gateway's own time in milliseconds, if it reports the time.
        lag: The seconds between the scheduled and the real time of sending.
        turn: The number of the turn in its conversation.
        text: The answer's text, if it is kept.
        ids: The answer's token ids, if they are kept.
        tool_calls: The number of tool calls in the answer.
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
    lag: float = 0.0
    turn: int = 0
    text: str | None = None
    ids: list[int] | None = None
    tool_calls: int = 0

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
        """Return the mean seconds per token after the first, or None for fewer than two tokens."""
        if self.first is None or self.tokens_out < 2:
            return None
        return (self.chunks[-1] - self.first) / (self.tokens_out - 1)

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between successive messages with tokens."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]

    def to_json(self, origin: float) -> dict[str, Any]:
        """Return the record without its text as JSON values.

        Times are in seconds relative to `origin`, rounded to microseconds.
        """
        data = asdict(self)
        for name in ("start", "first", "end"):
            data[name] = None if data[name] is None else round(data[name] - origin, 6)
        data["chunks"] = [round(t - origin, 6) for t in self.chunks]
        data["lag"] = round(self.lag, 6)
        del data["text"], data["ids"]
        return data


def percentile(ordered: list[float], p: float) -> float:
    """Return the p-th percentile (0 to 100) of sorted values, interpolated like numpy's default."""
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
