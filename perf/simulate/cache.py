"""A replica's KV cache in blocks: those that running sequences hold, equal ones once, and those that are kept since."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Cache:
    """`added` and `evicted` gather hashes until somebody takes them.

    A block's hash stands for all that is before it too. So who holds a block holds those before it, of which only the
    last need know, and what is kept of a prompt is its beginning.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        # blocks of sequences that are not known by a hash (yet), and how many of them are still empty: they are sure to
        # be had, and until they are used what is kept for others stays in them
        self.reserved = self.unused = 0
        self.added: list[int] = []
        self.evicted: list[int] = []
        # blocks that are held: how many of them come right after, and of the sequences that end with it
        self._held: dict[int, int] = {}
        # those that are kept, and since when; what was let go at each time: some of it has been held or evicted since
        self._kept: dict[int, int] = {}
        self._let_go: deque[tuple[int, list[int]]] = deque()
        self._time = 0

    @property
    def free(self) -> int:
        """Those that no sequence holds; some of them have something in them."""
        return self.blocks - self.reserved + self.unused - len(self._held)

    def start(self, hashes: Sequence[int], needed: int) -> int | None:
        """Holds what is known of a prompt's beginning, and room for the rest of `needed` blocks. Returns how many were
        known; None when there is no room."""
        kept, held = self._kept, self._held_of(hashes, 0)
        if needed - held > self.blocks - self.reserved - len(self._held):
            return None
        known = held
        for name in hashes[held:]:
            if kept.pop(name, None) is None:
                break
            known += 1
        self._hold(hashes, held, known)
        self.reserved += needed - known
        return known

    def was_read(self, hashes: Sequence[int], known: int) -> None:
        """The prompt is in the cache: from now on others find it."""
        held, kept = self._held_of(hashes, known), self._kept
        self.reserved -= len(hashes) - known
        if known < len(hashes):
            if known:
                self._held[hashes[known - 1]] -= 1
            self._hold(hashes, held, len(hashes))
            self.added += [name for name in hashes[held:] if kept.pop(name, None) is None]

    def use(self, unused: int) -> None:
        """So many of the reserved blocks are still empty; what was kept in the others goes."""
        self.unused = unused
        over = self.reserved - unused + len(self._held) + len(self._kept) - self.blocks
        if over > 0:
            self._evict(min(over, len(self._kept)))

    def end(self, hashes: Sequence[int], rest: int, after: Sequence[int]) -> None:
        """A sequence leaves: its prompt's blocks and `rest` reserved ones. What is in them stays until others need
        the room, as do those of its answer (`after`). The end goes first: nothing is found without what is before."""
        held, kept = self._held, self._kept
        self.reserved -= rest
        out = [name for name in reversed(after) if name not in held and name not in kept]
        self.added += out
        for name in reversed(hashes):
            if held[name] > 1:
                held[name] -= 1
                break
            del held[name]
            out.append(name)
        self._time += 1
        kept.update(dict.fromkeys(out, self._time))
        self._let_go.append((self._time, out))

    def clear(self) -> None:
        self.reserved = self.unused = 0
        self._held.clear()
        self._kept.clear()
        self._let_go.clear()
        self.added.clear()
        self.evicted.clear()

    def _held_of(self, hashes: Sequence[int], low: int) -> int:
        """How many of them are held; the first `low` are."""
        held, high = self._held, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def _hold(self, hashes: Sequence[int], held: int, end: int) -> None:
        """The first `end`, of which so many are held already."""
        if held:
            self._held[hashes[held - 1]] += 1
        self._held.update(dict.fromkeys(hashes[held:end], 1))

    def _evict(self, count: int) -> None:
        """So many of those that are kept, the oldest first."""
        kept, evicted = self._kept, self.evicted
        while count:
            time, names = self._let_go.popleft()
            for at, name in enumerate(names):
                if kept.get(name) == time:
                    if not count:
                        self._let_go.appendleft((time, names[at:]))
                        break
                    del kept[name]
                    evicted.append(name)
                    count -= 1
