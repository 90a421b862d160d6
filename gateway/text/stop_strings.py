"""Detection of stop strings in streamed text.

The text is cut where a search in the whole text would cut it: at the leftmost occurrence of any
stop string. Text that may be the beginning of a stop string is held back until later text decides.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """A search for the stop strings of one sequence.

    Attributes:
        matched: The stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Search for `stops`, which must not contain an empty string: it would match at once."""
        self._stops = tuple(dict.fromkeys(stops))
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops))
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add `text` and return the text that may be sent now, which is empty after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        start, stop = self._find(text)
        open_at = self._first_open(text)
        if start < open_at:
            self.matched, self._held = stop, ""
            return text[:start]
        self._held = text[open_at:]
        return text[:open_at]

    def flush(self) -> str:
        """Return the text that was held back, once the sequence has ended."""
        text, self._held = self._held, ""
        if self.matched is not None:
            return ""
        start, self.matched = self._find(text)
        return text[:start]

    def _find(self, text: str) -> tuple[int, str | None]:
        """Return the offset of the leftmost match, and its stop string.

        Without a match, return the length of `text` and None.
        """
        best, found = len(text), None
        for stop in self._stops:
            at = text.find(stop, 0, best + len(stop) - 1)
            if 0 <= at < best:
                best, found = at, stop
        return best, found

    def _first_open(self, text: str) -> int:
        """Return the offset of the longest suffix of `text` that a stop string begins with.

        Without such a suffix, return the length of `text`.
        """
        end = len(text)
        for at in range(max(0, end - self._longest + 1), end):
            if text[at] in self._firsts and self._opens(text[at:]):
                return at
        return end

    def _opens(self, tail: str) -> bool:
        return any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops)
