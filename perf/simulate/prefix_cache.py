"""A replica's KV cache in blocks: those that running sequences hold, equal ones once, and those that are kept since."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PrefixCache:
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
        # of a block that is held: how many such come right after it, and of the sequences that end with it; of one that
        # is kept since: the time, which is negative
        self._known: dict[int, int] = {}
        self._held = 0
        # what was let go at each time: some of it has been held or evicted since
        self._let_go: deque[tuple[int, list[int]]] = deque()
        self._time = 0

    @property
    def free(self) -> int:
        """Those that no sequence holds; some of them have something in them."""
        return self.blocks - self.reserved + self.unused - self._held

    def start(self, hashes: Sequence[int], needed: int) -> int | None:
        """Holds what is known of a prompt's beginning, and room for the rest of `needed` blocks. Returns how many were
        known; None when there is no room."""
        counts, held = self._known, self._held_of(hashes, 0)
        if needed - held > self.blocks - self.reserved - self._held:
            return None
        if held:
            counts[hashes[held - 1]] += 1
        known = held
        for name in hashes[held:]:
            if name not in counts:
                break
            counts[name] = 1
            known += 1
        self._held += known - held
        self.reserved += needed - known
        return known

    def was_read(self, hashes: Sequence[int], known: int) -> None:
        """The prompt is in the cache: from now on others find it."""
        counts, held, size = self._known, self._held_of(hashes, known), len(hashes)
        self.reserved -= size - known
        if known < size:
            if known:
                counts[hashes[known - 1]] -= 1
            if held:
                counts[hashes[held - 1]] += 1
            for name in hashes[held:]:
                if name not in counts:
                    self.added.append(name)
                counts[name] = 1
            self._held += size - held

    def use(self, unused: int) -> None:
        """So many of the reserved blocks are still empty; what was kept in the others goes."""
        self.unused = unused
        over = self.reserved - unused + len(self._known) - self.blocks
        if over > 0:
            self._evict(min(over, len(self._known) - self._held))

    def end(self, hashes: Sequence[int], rest: int, after: Sequence[int]) -> None:
        """A sequence leaves: its prompt's blocks and `rest` reserved ones. What is in them stays until others need
        the room, as do those of its answer (`after`). The end goes first: nothing is found without what is before."""
        counts = self._known
        self.reserved -= rest
        out = [name for name in reversed(after) if name not in counts]
        self.added += out
        self._held += len(out)
        for name in reversed(hashes):
            if counts[name] > 1:
                counts[name] -= 1
                break
            out.append(name)
        self._held -= len(out)
        self._time -= 1
        for name in out:
            counts[name] = self._time
        self._let_go.append((self._time, out))

    def clear(self) -> None:
        self.reserved = self.unused = 0
        self._held = 0
        self._known.clear()
        self._let_go.clear()
        self.added.clear()
        self.evicted.clear()

    def _held_of(self, hashes: Sequence[int], low: int) -> int:
        """How many of them are held; the first `low` are."""
        counts, high = self._known, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if counts.get(hashes[middle], 0) > 0:
                low = middle + 1
            else:
                high = middle
        return low

    def _evict(self, count: int) -> None:
        """So many of those that are kept, the oldest first."""
        counts, evicted = self._known, self.evicted
        while count:
            time, names = self._let_go.popleft()
            for at, name in enumerate(names):
                if counts.get(name) == time:
                    if not count:
                        self._let_go.appendleft((time, names[at:]))
                        break
                    del counts[name]
                    evicted.append(name)
                    count -= 1
