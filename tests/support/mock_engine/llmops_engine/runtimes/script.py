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
    """A text over and over, of tokens that are all different: it goes on after the last token of `ids`."""

    def after(self, ids: Sequence[int]) -> Iterator[int]:
        at, size = 0, len(self.token_ids)
        if ids and ids[-1] in self.token_ids:
            at = self.token_ids.index(ids[-1]) + 1
        while True:
            yield self.token_ids[at % size]
            at += 1


class Mixed(Script):
    """Tokens in an order that nobody could guess: a prompt with one token more, less or changed goes on differently."""

    def after(self, ids: Sequence[int]) -> Iterator[int]:
        seen, size = xxh3_64(array("i", ids).tobytes()), len(self.token_ids)
        while True:
            token = self.token_ids[seen.intdigest() % size]
            seen.update(token.to_bytes(4, "little"))
            yield token
