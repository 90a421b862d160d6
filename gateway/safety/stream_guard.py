"""Filters on the text of a running answer.

Each choice has a guard, which runs after the stop strings and before the parsers.

Rules are matched as the text arrives. Filters that ask a model or a service judge windows of text:

    hold      [ window 1 ] judged, then released   [ window 2 ] judged, then released   …
    cut       released at once; the verdict on a window is waited for at most two tokens
              after the window's end
    observe   released at once; verdicts are counted
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from llmops.gateway.safety.filters import UNAVAILABLE, FilterUnavailableError, Finding, StreamMode, TextFilter
from llmops.gateway.safety.rules import RuleFilter, run_search

#: Number of tokens that are released in mode `cut` while the window before them is still judged.
TOKENS_IN_FLIGHT = 2

#: Number of new characters after which the text is searched again: a search costs microseconds even
#: for a short text.
SEARCH_STEP = 64


class RuleStage:
    """The application of a rule to a stream of text."""

    def __init__(self, rule: RuleFilter, mode: StreamMode, before: str = "") -> None:
        """Apply `rule` to an answer that continues the text `before`."""
        self._rule, self.mode = rule, mode
        # `_text` is the end of `before`, followed by text of the answer that may be part of a
        # match. The other attributes are indices in `_text`: the answer begins at `_answer`, a
        # match can begin at `_start` (one character is kept before it, for \b), and the text up to
        # `_context` was released.
        self._text = before[-(rule.width + 1) :]
        self._start = int(len(before) > rule.width)
        self._answer = self._context = self._searched = len(self._text)

    def feed(self, text: str, final: bool) -> tuple[str, Finding | None]:
        """Return the text to release, and the finding after this text, if there is one.

        `final` is True for the last text of the choice.
        """
        self._text += text
        holds = self.mode == "hold"
        if not final and len(self._text) - self._searched < SEARCH_STEP:
            return "" if holds else text, None
        found = self._rule.search(self._text, self._start)
        # Skip matches that lie entirely in the client's own text.
        while found is not None and found.end <= self._answer:
            found = self._rule.search(self._text, found.start + 1)
        # A match at the very end may continue, and the next character determines whether a word
        # ends there.
        if found is not None and (final or found.end < len(self._text)):
            released = self._text[self._context : found.start] if holds else text if self.mode == "observe" else ""
            return released, self._rule.finding
        safe = len(self._text) if final else self._rule.settled(self._text)
        boundary, self._start = max(self._context, safe), max(self._start, safe)
        released = self._text[self._context : boundary] if holds else text
        cut = max(0, self._start - 1)
        self._text, self._start, self._context = self._text[cut:], self._start - cut, boundary - cut
        self._answer = max(0, self._answer - cut)
        self._searched = len(self._text)
        return released, None


class WindowStage:
    """The application of an awaited filter to a stream of text.

    The filter judges windows of the text, which overlap by a quarter.
    """

    def __init__(self, judge: TextFilter, mode: StreamMode, window: int, *, fail_open: bool, before: str = "") -> None:
        """Judge `window` characters at a time of an answer that continues the text `before`.

        A filter that cannot judge a window ends the answer, unless `fail_open` is True.
        """
        self._filter, self.mode, self._window, self._fail_open = judge, mode, window, fail_open
        self._pending, self._overlap = "", before[-(window // 4) :]
        self._verdict: asyncio.Task[Finding | None] | None = None
        self._tokens = 0

    async def feed(self, text: str, final: bool) -> tuple[str, Finding | None]:
        """Return the text to release, and the finding after this text, if there is one.

        `final` is True for the last text of the choice.
        """
        self._pending += text
        full = bool(self._pending) and (final or len(self._pending) >= self._window)
        if self.mode == "hold":
            if not full:
                return "", None
            window = self._pending
            finding = await self._judge()
            return ("", finding) if finding is not None else (window, None)
        self._tokens += 1
        finding = None
        if self._verdict is not None and (full or final or self._verdict.done() or self._tokens > TOKENS_IN_FLIGHT):
            finding, self._verdict = await self._verdict, None
        if finding is None and full:
            self._verdict, self._tokens = asyncio.create_task(self._judge()), 0
            if final:
                finding, self._verdict = await self._verdict, None
        return ("" if finding is not None and self.mode == "cut" else text), finding

    def close(self) -> None:
        if self._verdict is not None:
            self._verdict.cancel()

    def _judge(self) -> Coroutine[None, None, Finding | None]:
        window, self._pending = self._overlap + self._pending, ""
        self._overlap = window[-(self._window // 4) :]
        return self._verdict_on(window)

    async def _verdict_on(self, text: str) -> Finding | None:
        try:
            return await self._filter.judge(text)
        except FilterUnavailableError:
            return None if self._fail_open else Finding(self._filter.name, UNAVAILABLE)


class StreamGuard:
    """All filters of a policy, applied to the text of one choice.

    Attributes:
        finding: The finding that ended the answer; None until then.
        holds: True if no byte of a match may be released. Tool calls are then sent whole.
        waits: True if a filter has to be awaited. Tokens then cannot be pushed to the client.
    """

    def __init__(
        self, stages: Sequence[RuleStage | WindowStage], notify: Callable[[Finding, StreamMode], None]
    ) -> None:
        """Apply `stages` in their order.

        Args:
            stages: The filters of the policy.
            notify: Called with each finding, and with the mode of the filter that found it.
        """
        self._stages, self._notify = list(stages), notify
        self.finding: Finding | None = None
        self.holds = any(stage.mode == "hold" for stage in stages)
        self.waits = any(isinstance(stage, WindowStage) for stage in stages)

    def feed(self, text: str, final: bool) -> str:
        """Return the text to release now. Use this method only if `waits` is False.

        `final` is True for the last text of the choice.
        """
        for stage in tuple(self._stages):
            assert isinstance(stage, RuleStage)
            text, found = stage.feed(text, final or self.finding is not None)
            if found is not None:
                self._act_on(found, stage)
        return text

    async def judge(self, text: str, final: bool) -> str:
        """Return the text to release now, after awaiting filters that are due.

        `final` is True for the last text of the choice.
        """
        for stage in tuple(self._stages):
            ending = final or self.finding is not None
            if isinstance(stage, RuleStage):
                text, found = await run_search(len(text), partial(stage.feed, text, ending))
            else:
                text, found = await stage.feed(text, ending)
            if found is not None:
                self._act_on(found, stage)
        return text

    def close(self) -> None:
        """Cancel the verdicts that are still awaited."""
        for stage in self._stages:
            if isinstance(stage, WindowStage):
                stage.close()

    def _act_on(self, found: Finding, stage: RuleStage | WindowStage) -> None:
        self._notify(found, stage.mode)
        if stage.mode == "observe":
            self._stages.remove(stage)
        elif self.finding is None:
            self.finding = found
