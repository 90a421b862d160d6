"""Places of which no client can take all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class Shares:
    """Nobody may have more places than are left: of all, one address gets half, two get a third each, and who comes new
    finds some. Within an address, the same goes for its keys.

    Before them come `free` places that are anybody's; what one has of them counts once others wait behind them.
    """

    def __init__(self, places: int, free: int = 0) -> None:
        self.free, self.taken = free, 0
        self._places = places
        self._taken: dict[tuple[str, ...], int] = {}

    def take(self, path: Sequence[str], count: int = 1) -> bool:
        """`count` places for `path`, an address and perhaps a key. False when there are none."""
        levels = _levels(tuple(path))
        if self.taken + count > self.free and not self._has_room(levels, count):
            return False
        self.taken += count
        for names in levels:
            self._taken[names] = self._taken.get(names, 0) + count
        return True

    def give_back(self, path: Sequence[str], count: int = 1) -> None:
        self.taken -= count
        for names in _levels(tuple(path)):
            self._taken[names] -= count
            if not self._taken[names]:
                del self._taken[names]

    def _has_room(self, levels: Sequence[tuple[str, ...]], count: int) -> bool:
        before, after = max(self.taken - self.free, 0), self.taken + count - self.free
        if after > self._places:
            return False
        left = self._places - before
        for names in levels:
            mine = self._taken.get(names, 0)
            if min(mine + count, after) > left:
                return False
            left -= min(mine, before)
        return True


@lru_cache(maxsize=4096)
def _levels(path: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(path[: size + 1] for size in range(len(path)))
