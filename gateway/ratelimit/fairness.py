"""Places of which no client can take all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache


class FairShares:
    """Nobody may have more places than are left: of all, one address gets half, two get a third
    each, and who comes new finds some. Within an address, the same goes for its keys.

    Before them come `free` places that are anybody's; what one has of them counts once others wait
    behind them.
    """

    def __init__(self, places: int, free: int = 0) -> None:
        self.free, self.taken = free, 0
        self._places = places
        self._taken: defaultdict[str, int] = defaultdict(int)

    def take(self, share: str, count: int = 1) -> bool:
        """`count` places for `share`, as a Caller has it: an address, or `address/key`.

        False when there are none.
        """
        levels = _levels(share)
        if self.taken + count > self.free and not self._has_room(levels, count):
            return False
        self.taken += count
        for name in levels:
            self._taken[name] += count
        return True

    def give_back(self, share: str, count: int = 1) -> None:
        self.taken -= count
        for name in _levels(share):
            self._taken[name] -= count
            if not self._taken[name]:
                del self._taken[name]

    def _has_room(self, levels: Sequence[str], count: int) -> bool:
        before, after = max(self.taken - self.free, 0), self.taken + count - self.free
        if after > self._places:
            return False
        left = self._places - before
        for name in levels:
            mine = self._taken.get(name, 0)
            if min(mine + count, after) > left:
                return False
            left -= min(mine, before)
        return True


@lru_cache(maxsize=4096)
def _levels(share: str) -> tuple[str, ...]:
    address, slash, _ = share.partition("/")
    return (address, share) if slash else (share,)
