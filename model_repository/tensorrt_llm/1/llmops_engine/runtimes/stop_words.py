"""Search for stop words that the library itself cannot find."""

from __future__ import annotations

from collections.abc import Sequence


class StopWordMatcher:
    """A search for stop words in a token stream.

    The search remembers as many tokens as the longest word has.

    Words of one token are end tokens, which have no effect before `minimum` tokens have arrived.
    """

    __slots__ = ("_count", "_last", "_longest", "_minimum", "_words")

    def __init__(self, words: Sequence[Sequence[int]], minimum: int = 0) -> None:
        self._words = [list(word) for word in words]
        self._minimum, self._count = minimum, 0
        self._longest = max((len(word) for word in words), default=0)
        self._last: list[int] = []

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Search for a stop word that ends within the next tokens of the stream.

        Returns:
            The number of `token_ids` up to and including the first complete word, or None without
            one.
        """
        for index, token in enumerate(token_ids):
            self._last.append(token)
            self._count += 1
            enough = self._count >= self._minimum
            if any(self._last[-len(word) :] == word for word in self._words if enough or len(word) > 1):
                return index + 1
        del self._last[: -self._longest]
        return None
