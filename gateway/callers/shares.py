"""Places of which no client can take all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Shares:
    """Nobody may have more places than are left: of all, one address gets half, two get a third each, and who comes new
    finds some. Within an address, the same goes for its keys."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken: Counter[tuple[str, ...]] = Counter()

    def take(self, path: Sequence[str]) -> bool:
        """A place for `path`, an address and perhaps a key. False when there is none."""
        left = self._places
        for names in _levels(path):
            if self._taken[names] >= left:
                return False
            left -= self._taken[names]
        for names in _levels(path):
            self._taken[names] += 1
        return True

    def give_back(self, path: Sequence[str]) -> None:
        for names in _levels(path):
            self._taken[names] -= 1
            if not self._taken[names]:
                del self._taken[names]


def _levels(path: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(path[:size]) for size in range(len(path) + 1)]
