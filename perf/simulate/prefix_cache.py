"""The KV cache of a replica in blocks.

Blocks are held by running sequences and shared between them, or kept for reuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PrefixCache:
    """A prefix cache. `added` and `evicted` collect hashes until they are taken.

    A block's hash stands for all blocks before it too. So a holder of a block holds those before
    it, only the last of which has to be counted, and what is kept of a prompt is its beginning.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        # blocks of sequences without a hash (yet), and how many of them are still empty: until they
        # are filled, kept blocks stay in them
        self.reserved = self.unused = 0
        self.added: list[int] = []
        self.evicted: list[int] = []
        # per held block: the number of held blocks that follow it and of sequences that end with
        # it; per kept block: the negative time of its release
        self._known: dict[int, int] = {}
        self._held = 0
        # blocks released at each time, some of which have been held or evicted since
        self._let_go: deque[tuple[int, list[int]]] = deque()
        self._time = 0

    @property
    def free(self) -> int:
        """Return the number of blocks that no sequence holds, including kept ones."""
        return self.blocks - self.reserved + self.unused - self._held

    def start(self, hashes: Sequence[int], needed: int) -> int | None:
        """Hold the known beginning of a prompt, and reserve the rest of `needed` blocks.

        Returns:
            The number of known blocks, or None if there is no room.
        """
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
        """Add the prompt to the cache: from now on other requests find it."""
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
        """Set the number of reserved blocks that are still empty.

        Kept blocks in the others are evicted.
        """
        self.unused = unused
        over = self.reserved - unused + len(self._known) - self.blocks
        if over > 0:
            self._evict(min(over, len(self._known) - self._held))

    def end(self, hashes: Sequence[int], rest: int, after: Sequence[int]) -> None:
        """Release a sequence: its prompt's blocks and `rest` reserved ones.

        Their contents, and the answer's blocks (`after`), are kept until the room is needed. The
        end is evicted first, because a block is not found without those before it.
        """
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
        """Return how many of the first hashes are held. The first `low` are known to be."""
        counts, high = self._known, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if counts.get(hashes[middle], 0) > 0:
                low = middle + 1
            else:
                high = middle
        return low

    def _evict(self, count: int) -> None:
        """Evict this many kept blocks, the oldest first."""
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
