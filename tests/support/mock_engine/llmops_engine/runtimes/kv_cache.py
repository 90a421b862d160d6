"""A paged KV cache, counted: which blocks are held, which are only kept for another prompt, which go first."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Changes(NamedTuple):
    """Block names, as in a cache's events: those that it lost (all, if `cleared`) before those that it gained."""

    cleared: bool
    removed: list[int]
    stored: list[int]


class KvCache:
    """`size` blocks. A block that is full has a name and can be shared; the others belong to one sequence each.

    Named blocks that nobody holds stay until their place is needed; the one released first goes first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._unnamed = 0
        self._held: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._removed: list[int] = []
        self._stored: list[int] = []
        self._cleared = False

    @property
    def free(self) -> int:
        """Blocks that no sequence holds, whether or not something is kept in them."""
        return self.size - self._unnamed - len(self._held)

    def found(self, names: Sequence[int]) -> int:
        """Return how many of the first `names` are in the cache."""
        for count, name in enumerate(names):
            if name not in self._held and name not in self._kept:
                return count
        return len(names)

    def hold(self, names: Sequence[int]) -> None:
        """Take named blocks that are there."""
        for name in names:
            self._held[name] = self._held.get(name, 0) + 1
            self._kept.pop(name, None)

    def take(self, count: int) -> bool:
        """`count` blocks without a name; False when there is no room for them."""
        if count > self.free:
            return False
        self._unnamed += count
        while self._unnamed + len(self._held) + len(self._kept) > self.size:
            self._removed.append(self._kept.popitem(last=False)[0])
        return True

    def name(self, name: int) -> None:
        """A block without a name is full now; if another has the same content, this one is freed."""
        self._unnamed -= 1
        if name not in self._held and name not in self._kept:
            self._stored.append(name)
        self.hold([name])

    def let_go(self, names: Sequence[int], unnamed: int) -> None:
        """A sequence's blocks, its first ones last: what others may share is kept longest."""
        self._unnamed -= unnamed
        for name in reversed(names):
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
                self._kept[name] = None

    def drop(self) -> None:
        """Forget what nobody holds."""
        self._cleared = True
        self._kept.clear()
        self._removed.clear()
        # what is in use is still there, and has to be reported again
        self._stored = list(self._held)

    def changes(self) -> Changes:
        """Since the last call."""
        changes = Changes(self._cleared, self._removed, self._stored)
        self._cleared, self._removed, self._stored = False, [], []
        return changes
