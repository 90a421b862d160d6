"""A choice of an answer: turns tokens into text up to a stop string and finds the finish reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from llmops.gateway.generation.parsers.output_processor import (
    ContentDelta,
    OutputDelta,
    OutputProcessor,
    ToolCallDelta,
)
from llmops.gateway.interfaces import FinishReason, TokenBatch, TopLogprobs
from llmops.gateway.safety.stream_guard import StreamGuard
from llmops.gateway.text.detokenizer import Detokenizer
from llmops.gateway.text.stop_strings import StopStringMatcher

#: Log-probabilities of an answer that is sent whole, in all choices.
MAX_LOGPROBS = 100_000
#: Bytes of memory that one of them takes until the answer is sent, rendered.
LOGPROB_BYTES = 350
#: Log-probabilities for which memory is asked at once: fewer cost nothing, as in most answers.
_LOGPROB_STEP = 1000
#: The log-probability of a token that a grammar or a broken engine excludes.
MIN_LOGPROB = -9999.0


class TokenLogprob(NamedTuple):
    """A token with its natural-log probability.

    `offset` is the place of the token's text in the choice's text, in characters. `tops` has the
    bytes and the probabilities of the most likely tokens in its place.
    """

    token: bytes
    logprob: float
    offset: int
    tops: Sequence[tuple[bytes, float]] = ()


class Choice:
    """A choice of an answer.

    Attributes:
        completion_tokens: Its tokens without the end token.
        plain: True if all text is content, so that `sort` need not be called.
        overran: True if the gateway ends the choice: the engine went on beyond `max_tokens`, or the
            answer has as many log-probabilities as may be kept.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        max_tokens: int,
        end_ids: frozenset[int] = frozenset(),
        stops: Sequence[str] = (),
        processor: OutputProcessor | None = None,
        logprobs: LogprobBuffer | None = None,
        starts: TokenOffsets | None = None,
        guard: StreamGuard | None = None,
    ) -> None:
        """Create an empty choice.

        Args:
            index: The number of the choice in its answer.
            detokenizer: Turns tokens into text.
            max_tokens: Tokens after which the engine stops.
            end_ids: Tokens that end the text and are not part of it.
            stops: Stop strings.
            processor: Finds thinking and tool calls. None if all text is content.
            logprobs: Collects log-probabilities, if they are requested.
            starts: Counts the tokens of thinking, if the processor may find any.
            guard: Filters the text.
        """
        self.index = index
        self._detokenizer = detokenizer
        self.max_tokens = max_tokens
        self._end_ids = end_ids
        self._stop = StopStringMatcher(stops) if stops else None
        self._processor = processor
        self.plain = processor is None
        self._received = 0
        self._decoded = 0  # characters of text so far
        self._starts = starts
        self._processor_finished = False
        self.logprobs = logprobs
        self.guard = guard
        self.held_calls: list[OutputDelta] = []
        # the alternatives of each prompt token but the first, in one choice of each prompt
        self.prompt_logprobs: Sequence[TopLogprobs] | None = None
        self.completion_tokens = 0
        self.done = self.overran = False
        self.finish_reason: FinishReason = "length"
        self.stop_reason: str | int | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Return the tokens of thinking without its markers.

        The number is final once `sort` has seen the end.
        """
        if self._starts is None or self._processor is None:
            return 0
        return self._starts.count(self._processor.thinking)

    def feed(self, batch: TokenBatch) -> str:
        """Add tokens and return the text that can be sent.

        Sets `done` at an end token, a stop string, or beyond `max_tokens`.
        """
        if self.done:
            return ""
        if batch.prompt is not None:
            self.prompt_logprobs = batch.prompt
        tokens = batch.tokens
        self._received += len(tokens)
        if tokens[-1] in self._end_ids:
            self.stop_reason = tokens[-1]
            tokens = tokens[:-1]
            self.done = True
        room = self.max_tokens - self.completion_tokens
        if len(tokens) > room:
            # the caller has reserved for no more, and an engine that did not stop may never stop
            self.overran = True
            tokens = tokens[: max(room, 0)]
        self.completion_tokens += len(tokens)
        if self.logprobs is None and self._starts is None:
            text = self._detokenizer.feed(tokens) if tokens else ""
        else:
            text = "".join([self._decode_one(token, at, batch.logprobs, batch.tops) for at, token in enumerate(tokens)])
            if self.logprobs is not None and self.logprobs.is_full and not self.done:
                self.overran = True
        if self._stop is not None:
            text = self._stop.feed(text)
        if self.overran:
            text += self._end("length")
        elif self.done or (self._stop is not None and self._stop.matched is not None):
            text += self._end("stop")
        return text if self.guard is None else self._filter(text)

    def finish(self) -> str:
        """Return the rest of the text, once the engine's stream has ended."""
        if self.done:
            return ""
        # the engine may not send the end token: then it stopped before the length was reached
        return self._filter(self._end("stop" if self._received < self.max_tokens else "length"))

    async def judge(self, text: str) -> str:
        """Return the part of `text` that the asynchronous filters let pass."""
        assert self.guard is not None
        text = await self.guard.judge(text, self.done)
        self._end_if_filtered()
        return text

    def take_logprobs(self, text: str) -> list[TokenLogprob] | None:
        """Return the log-probabilities of `text`, which `feed` or `finish` just returned.

        The result is None unless the request asks for log-probabilities.
        """
        if self.logprobs is None:
            return None
        return self.logprobs.take(
            text,
            ended=self.done,
            cut=isinstance(self.stop_reason, str) or self.finish_reason == "content_filter",
            whole=self.guard is not None and self.guard.holds,
        )

    def sort(self, text: str) -> list[OutputDelta]:
        """Return `text` as deltas of content, thinking and tool calls.

        At the end, they include what was held back.
        """
        if self._processor is None:
            return [ContentDelta(text)] if text else []
        deltas = list(self._processor.feed(text)) if text else []
        if self.done and not self._processor_finished:
            self._processor_finished = True
            deltas.extend(self._processor.finish())
            if self.finish_reason == "stop" and self._processor.made_tool_calls:
                self.finish_reason = "tool_calls"
        return self._whole_calls(deltas) if self.guard is not None and self.guard.holds else deltas

    def _whole_calls(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Hold tool calls back until the whole answer has been judged.

        An answer that a filter cut sends none of its tool calls.
        """
        calls = [piece for piece in deltas if isinstance(piece, ToolCallDelta)]
        passed: list[OutputDelta] = [piece for piece in deltas if not isinstance(piece, ToolCallDelta)]
        self.held_calls.extend(calls)
        if not self.done or self.finish_reason == "content_filter":
            return passed
        held, self.held_calls = self.held_calls, []
        return passed + held

    def _filter(self, text: str) -> str:
        if self.guard is None or self.guard.waits:
            return text
        text = self.guard.feed(text, self.done)
        self._end_if_filtered()
        return text

    def _end_if_filtered(self) -> None:
        if self.guard is not None and self.guard.finding is not None:
            self.done, self.finish_reason, self.stop_reason = True, "content_filter", None

    def _decode_one(
        self, token: int, at: int, logprobs: Sequence[float] | None, tops: Sequence[TopLogprobs] | None
    ) -> str:
        text = self._detokenizer.feed([token])
        if self.logprobs is not None:
            value = logprobs[at] if logprobs is not None and at < len(logprobs) else 0.0
            ranked = tops[at] if tops is not None and at < len(tops) else ()
            self.logprobs.note(token, value, self._decoded, ranked, size=len(text))
        if self._starts is not None:
            self._starts.note(token, self._decoded, len(text))
        self._decoded += len(text)
        return text

    def _end(self, reason: FinishReason) -> str:
        self.done = True
        self.finish_reason = reason
        text = self._detokenizer.flush()
        if self._stop is not None:
            text = self._stop.feed(text) + self._stop.flush()
            if self._stop.matched is not None:
                self.stop_reason = self._stop.matched
                self.finish_reason = "stop"
        return text


class TokenOffsets:
    """The offsets of the tokens in a choice's text, to count the tokens of any part of it."""

    def __init__(self, markers: Mapping[int, int]) -> None:
        """Create an empty table.

        `markers` has the ids of markers that are one token, with the length of their text.
        """
        self._markers = markers
        self._starts: list[int] = []

    def note(self, token: int, decoded: int, size: int) -> None:
        """Add a token that arrived after `decoded` characters and added `size` characters."""
        # text that a detokenizer held back comes together with the marker, but in front of it
        own = self._markers.get(token)
        self._starts.append(decoded if own is None else max(decoded, decoded + size - own))

    def count(self, spans: Iterable[tuple[int, float]]) -> int:
        """Return the number of tokens that start inside `spans`."""
        return sum(bisect_left(self._starts, end) - bisect_left(self._starts, start) for start, end in spans)


def json_logprob(value: float) -> float:
    """Return a log-probability that JSON can express: OpenAI's least one for -inf and NaN."""
    return min(max(MIN_LOGPROB, value), 0.0)


class LogprobBuffer:
    """Log-probabilities that wait for the text they belong to, so that both are sent together."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        most: int | None = None,
        hold: Callable[[int], bool] = lambda size: True,
    ) -> None:
        """Create a buffer.

        Args:
            token_bytes: Returns the bytes of a token.
            most: The number of values after which the buffer is full; None for a stream, which
                keeps none.
            hold: Counts bytes that the buffer takes, and returns False if they are too many: then
                the buffer is full.
        """
        self._token_bytes, self._hold = token_bytes, hold
        self._left, self._uncounted = most, 0
        self._sent = 0
        self._waiting: list[TokenLogprob] = []
        # where the text of each waiting token ends
        self._ends: list[int] = []

    def note(self, token: int, logprob: float, offset: int, tops: TopLogprobs = (), size: int = 1) -> None:
        """Add a token with its log-probability, the offset of its text and the text's characters."""
        # a token without a character of its own is a part of the next character
        self._ends.append(offset + max(size, 1))
        if self._left is not None:
            self._left -= 1 + len(tops)
            self._uncounted += 1 + len(tops)
            if self._uncounted >= _LOGPROB_STEP:
                if not self._hold(LOGPROB_BYTES * self._uncounted):
                    self._left = 0
                self._uncounted = 0
        ranked = [(self._token_bytes(one), json_logprob(value)) for one, value in tops]
        self._waiting.append(TokenLogprob(self._token_bytes(token), json_logprob(logprob), offset, ranked))

    @property
    def is_full(self) -> bool:
        return self._left is not None and self._left <= 0

    def take(self, text: str, *, ended: bool, cut: bool, whole: bool = False) -> list[TokenLogprob]:
        """Return the log-probabilities of `text`, the next piece that is sent.

        Args:
            text: The piece.
            ended: The choice has ended, so that all remaining ones are returned.
            cut: The text was cut at its end, so that tokens behind the cut are dropped.
            whole: Return only tokens of which all text was sent, because the rest may be held by a
                filter.
        """
        self._sent += len(text)
        if ended and not cut:
            taken, self._waiting = self._waiting, []
            self._ends.clear()
            return taken
        if whole:
            count = sum(1 for end in self._ends if end <= self._sent)
        else:
            count = sum(1 for one in self._waiting if one.offset < self._sent)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        del self._ends[:count]
        return taken
