"""A choice of an answer, which turns tokens into text and finds the finish reason."""

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

#: Maximum number of log-probabilities of an answer that is sent whole, in all choices together:
#: their memory is needed until the answer is sent.
MAX_LOGPROBS = 100_000
#: Memory of one log-probability until the answer is sent, once rendered, in bytes.
LOGPROB_BYTES = 350
#: Number of log-probabilities for which memory is requested at once. Most answers have fewer, for
#: which no memory is requested.
_LOGPROB_STEP = 1000
#: Log-probability of a token that a grammar or a broken engine excludes: the lowest value of
#: OpenAI's API.
MIN_LOGPROB = -9999.0


class TokenLogprob(NamedTuple):
    """A token with its log-probability.

    Attributes:
        token: The bytes of the token.
        logprob: The natural logarithm of the token's probability.
        offset: The place of the token's text in the choice's text, in characters.
        tops: The bytes and the log-probabilities of the most likely tokens at this place.
    """

    token: bytes
    logprob: float
    offset: int
    tops: Sequence[tuple[bytes, float]] = ()


class Choice:
    """A choice of an answer.

    Attributes:
        completion_tokens: The number of generated tokens, without the end token.
        plain: True if all text is content, so that `sort` need not be called.
        overran: True if the gateway ends the choice: the engine continued beyond `max_tokens`, or
            the answer has the maximum number of log-probabilities.
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
            end_ids: Tokens that end the text without being part of the text.
            stops: Stop strings.
            processor: Finds thinking and tool calls; None if all text is content.
            logprobs: Collects log-probabilities; None if the request has none.
            starts: Counts the tokens of thinking; None for a model without thinking.
            guard: Filters the text; None without filters.
        """
        self.index = index
        self._detokenizer = detokenizer
        self.max_tokens = max_tokens
        self._end_ids = end_ids
        self._stop = StopStringMatcher(stops) if stops else None
        self._processor = processor
        self.plain = processor is None
        self._received = 0
        self._decoded = 0  # Number of characters of text so far.
        self._starts = starts
        self._processor_finished = False
        self.logprobs = logprobs
        self.guard = guard
        self.held_calls: list[OutputDelta] = []
        # Alternatives of each prompt token except the first, in one choice of each prompt.
        self.prompt_logprobs: Sequence[TopLogprobs] | None = None
        self.completion_tokens = 0
        self.done = self.overran = False
        self.finish_reason: FinishReason = "length"
        self.stop_reason: str | int | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of tokens of thinking, without its markers.

        The number is final once `sort` has processed the end.
        """
        if self._starts is None or self._processor is None:
            return 0
        return self._starts.count(self._processor.thinking)

    def feed(self, batch: TokenBatch) -> str:
        """Add tokens, and return the text that can be sent.

        Sets `done` at an end token, at a stop string, or beyond `max_tokens`.
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
            # The caller has reserved no more tokens, and an engine that did not stop here may never
            # stop.
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
        """Return the rest of the text after the engine's stream has ended."""
        if self.done:
            return ""
        # Some engines do not send the end token: below the maximum length, the model then stopped
        # by itself.
        return self._filter(self._end("stop" if self._received < self.max_tokens else "length"))

    async def judge(self, text: str) -> str:
        """Return the part of `text` that the asynchronous filters release."""
        assert self.guard is not None
        text = await self.guard.judge(text, self.done)
        self._end_if_filtered()
        return text

    def take_logprobs(self, text: str) -> list[TokenLogprob] | None:
        """Return the log-probabilities of `text`, which `feed` or `finish` has just returned.

        Return None unless the request asks for log-probabilities.
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

        At the end, the deltas include text that was held back.
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
        """Return `deltas` without tool calls until the filters have judged the whole answer.

        The deltas of the judged answer are followed by all tool calls that were held back. An
        answer that a filter cut sends none of its tool calls.
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
    """The offsets of tokens in a choice's text, for counting the tokens of a part of the text."""

    def __init__(self, markers: Mapping[int, int]) -> None:
        """Create an empty table.

        `markers` has the lengths in characters of the markers that are one token, by token id.
        """
        self._markers = markers
        self._starts: list[int] = []

    def note(self, token: int, decoded: int, size: int) -> None:
        """Add a token that arrived after `decoded` characters of text and added `size` characters."""
        # Text that a detokenizer held back arrives together with the marker, but stands before it.
        own = self._markers.get(token)
        self._starts.append(decoded if own is None else max(decoded, decoded + size - own))

    def count(self, spans: Iterable[tuple[int, float]]) -> int:
        """Return the number of tokens that start inside `spans`."""
        return sum(bisect_left(self._starts, end) - bisect_left(self._starts, start) for start, end in spans)


def json_logprob(value: float) -> float:
    """Return a log-probability that JSON can express: OpenAI's lowest value for -inf and NaN."""
    return min(max(MIN_LOGPROB, value), 0.0)


class LogprobBuffer:
    """A buffer of log-probabilities that wait for their text, so that both are sent together."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        most: int | None = None,
        hold: Callable[[int], bool] = lambda size: True,
    ) -> None:
        """Create a buffer.

        Args:
            token_bytes: Returns the bytes of a token.
            most: The number of values after which the buffer is full; None for a stream, whose
                values are sent with their text.
            hold: Called with additional bytes of memory; returns False if the gateway cannot hold
                that many bytes, which makes the buffer full.
        """
        self._token_bytes, self._hold = token_bytes, hold
        self._left, self._uncounted = most, 0
        self._sent = 0
        self._waiting: list[TokenLogprob] = []
        # End offset of the text of each waiting token.
        self._ends: list[int] = []

    def note(self, token: int, logprob: float, offset: int, tops: TopLogprobs = (), size: int = 1) -> None:
        """Add a token with its log-probability, and the offset and length of its text."""
        # A token without a complete character belongs to the next character.
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
            ended: True if the choice has ended, so that all remaining log-probabilities are
                returned.
            cut: True if the text was cut at its end, so that tokens after the cut are dropped.
            whole: True to return only tokens whose text was sent completely, because a filter may
                hold the rest.
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
