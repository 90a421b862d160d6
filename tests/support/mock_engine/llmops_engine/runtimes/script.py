"""The script of the mock engine's answers.

Each next token is a function of the prompt and the tokens so far, and of nothing else.

So another replica, given the prompt and the tokens so far, continues an answer exactly as this one would have.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64


class Script(ABC):
    """Says only tokens of `token_ids`."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)

    @abstractmethod
    def after(self, ids: Sequence[int]) -> Iterator[int]:
        """All that follows `ids`, without an end."""


class Cycle(Script):
    """A text over and over: it goes on after the longest end of `ids` that is a beginning of it, however long."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(_root(list(token_ids)))
        self._said = frozenset(self.token_ids)
        self._borders = _borders(self.token_ids * 2)

    def after(self, ids: Sequence[int]) -> Iterator[int]:
        at, size = self._matched(ids), len(self.token_ids)
        while True:
            yield self.token_ids[at % size]
            at += 1

    def _matched(self, ids: Sequence[int]) -> int:
        """The length of that end. Only what comes after the last token of another text can belong to it."""
        start = len(ids)
        while start and ids[start - 1] in self._said:
            start -= 1
        tokens, size, at = self.token_ids, len(self.token_ids), 0
        for token in ids[start:]:
            while at and tokens[at % size] != token:
                # beginnings of more than two rounds have the same end as those of one round less
                at = at % size + size if at > 2 * size else self._borders[at - 1]
            at += tokens[at % size] == token
        return at


class Mixed(Script):
    """Tokens in an order that nobody could guess: a prompt with one token more, less or changed goes on differently."""

    def after(self, ids: Sequence[int]) -> Iterator[int]:
        seen, size = xxh3_64(array("i", ids).tobytes()), len(self.token_ids)
        while True:
            token = self.token_ids[seen.intdigest() % size]
            seen.update(token.to_bytes(4, "little"))
            yield token


def _root(tokens: list[int]) -> list[int]:
    """The shortest text whose repetition `tokens` is."""
    period = len(tokens) - _borders(tokens)[-1]
    return tokens[:period] if len(tokens) % period == 0 else tokens


def _borders(tokens: Sequence[int]) -> list[int]:
    """Return for each prefix of `tokens` its longest proper border (Knuth, Morris and Pratt).

    A border is a shorter prefix with which the prefix ends.
    """
    found, at = [0], 0
    for token in tokens[1:]:
        while at and tokens[at] != token:
            at = found[at - 1]
        at += tokens[at] == token
        found.append(at)
    return found
