"""Stop words of several tokens, found as the tokens come."""

from __future__ import annotations

from collections.abc import Sequence


class StopWordMatcher:
    """Remembers as many tokens as the longest word has; `find` takes each step's tokens once."""

    __slots__ = ("_last", "_longest", "_words")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._words = [list(word) for word in words]
        self._longest = max((len(word) for word in words), default=0)
        self._last: list[int] = []

    def find(self, token_ids: Sequence[int]) -> int | None:
        """How many of `token_ids` belong to the sequence when a word is complete within them (the word included)."""
        for index, token in enumerate(token_ids):
            self._last.append(token)
            if any(self._last[-len(word) :] == word for word in self._words):
                return index + 1
        del self._last[: -self._longest]
        return None
