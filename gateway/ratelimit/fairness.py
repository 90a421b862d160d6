"""A pool of slots that is shared fairly, so that no client can take all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache


class FairShares:
    """A pool of slots in which a client may hold at most as many slots as the client leaves free.

    A single address gets half of the slots, two addresses get a third each, and a new address
    always finds free slots. Within an address, the same rule applies to its keys.

    The pool has another `free` slots that any client can take first. Once more than `free` slots
    are in use, a client's slots among these count against the client too.
    """

    def __init__(self, places: int, free: int = 0) -> None:
        self.free, self.taken = free, 0
        self._places = places
        self._taken: defaultdict[str, int] = defaultdict(int)

    def take(self, share: str, count: int = 1) -> bool:
        """Take `count` slots for a client.

        Return False, and take none, if the client's share has no room for `count` slots.

        Args:
            share: The client, in the form of `Caller.share`: an address, or `address/key`.
            count: The number of slots.
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
