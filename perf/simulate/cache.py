"""A replica's KV cache in blocks: those that running sequences hold, equal ones once, and those that are kept since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Cache:
    """`added` and `evicted` gather hashes until somebody takes them."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        # blocks of sequences that are not known by a hash (yet), and how many of them are still empty: they are sure to
        # be had, and until they are used what is kept for others stays in them
        self.reserved = self.unused = 0
        self.added: list[int] = []
        self.evicted: list[int] = []
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Those that no sequence holds; some of them have something in them."""
        return self.blocks - self.reserved + self.unused - len(self._held)

    def start(self, hashes: Sequence[int], needed: int) -> int | None:
        """Holds what is known of a prompt's beginning, and room for the rest of `needed` blocks. Returns how many were
        known; None when there is no room."""
        held, idle = self._held, self._idle
        known = idle_ones = 0
        for name in hashes:
            if name in idle:
                idle_ones += 1
            elif name not in held:
                break
            known += 1
        if needed - known + idle_ones > self.free - self.unused:
            return None
        for name in hashes[:known]:
            count = held.get(name)
            if count is None:
                del idle[name]
                held[name] = 1
            else:
                held[name] = count + 1
        self.reserved += needed - known
        return known

    def was_read(self, hashes: Sequence[int], known: int) -> None:
        """The prompt is in the cache: from now on others find it."""
        held, idle = self._held, self._idle
        for name in hashes[known:]:
            self.reserved -= 1
            count = held.get(name)
            if count is not None:
                held[name] = count + 1
            else:
                if name in idle:
                    del idle[name]
                else:
                    self.added.append(name)
                held[name] = 1

    def use(self, unused: int) -> None:
        """So many of the reserved blocks are still empty; what was kept in the others goes."""
        self.unused = unused
        over = self.reserved - unused + len(self._held) + len(self._idle) - self.blocks
        for _ in range(min(over, len(self._idle))):
            self.evicted.append(self._idle.popitem(last=False)[0])

    def end(self, hashes: Sequence[int], rest: int, after: Sequence[int]) -> None:
        """A sequence leaves: its prompt's blocks and `rest` reserved ones. What is in them stays until others need
        the room, as do those of its answer (`after`). The end goes first: nothing is found without what is before."""
        held, idle = self._held, self._idle
        self.reserved -= rest
        for name in reversed(after):
            if name not in held and name not in idle:
                idle[name] = None
                self.added.append(name)
        for name in reversed(hashes):
            count = held[name] - 1
            if count:
                held[name] = count
            else:
                del held[name]
                idle[name] = None

    def clear(self) -> None:
        self.reserved = self.unused = 0
        self._held.clear()
        self._idle.clear()
        self.added.clear()
        self.evicted.clear()
