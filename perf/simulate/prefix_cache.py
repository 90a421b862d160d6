"""The KV cache of a simulated replica in blocks.

Running sequences hold blocks and share them. Other blocks are kept for reuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PrefixCache:
    """A prefix cache.

    The hash of a block stands for the block and all blocks before it. So the holder of a block also
    holds the blocks before it, and only the last held block of a sequence is counted. `added` and
    `evicted` collect the hashes of changes until a caller takes them.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        # Number of blocks that sequences hold and that have no hash yet, and number of these blocks
        # that are still empty. Until a sequence fills an empty block, a kept block stays in it.
        self.reserved = self.unused = 0
        self.added: list[int] = []
        self.evicted: list[int] = []
        # For a held block, the number of held blocks and sequences directly after it. For a kept
        # block, the negative time of its release.
        self._known: dict[int, int] = {}
        self._held = 0
        # The blocks released at each time. Some of the blocks were held again or evicted since.
        self._let_go: deque[tuple[int, list[int]]] = deque()
        self._time = 0

    @property
    def free(self) -> int:
        """Return the number of blocks that no sequence holds, including kept blocks."""
        return self.blocks - self.reserved + self.unused - self._held

    def start(self, hashes: Sequence[int], needed: int) -> int | None:
        """Hold the cached beginning of a prompt, and reserve the rest of `needed` blocks.

        Returns:
            The number of cached blocks, or None if there is no room.
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
        """Add a prompt that was computed to the cache, so that other requests find the prompt.

        `hashes` are the hashes of the prompt's whole blocks, of which the first `known` were found
        in the cache.
        """
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
        """Set `unused`, the number of reserved blocks that are still empty.

        The other reserved blocks are full, so kept blocks in their place are evicted.
        """
        self.unused = unused
        over = self.reserved - unused + len(self._known) - self.blocks
        if over > 0:
            self._evict(min(over, len(self._known) - self._held))

    def end(self, hashes: Sequence[int], rest: int, after: Sequence[int]) -> None:
        """Release the blocks of a sequence: the blocks of the prompt, and `rest` reserved blocks.

        The blocks of the prompt (`hashes`) and of the answer (`after`) are kept until other
        sequences need the room. The last blocks are evicted first, because a block cannot be found
        without the blocks before it.
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
        """Return the number of leading blocks of `hashes` that sequences hold.

        At least the first `low` blocks are held.
        """
        counts, high = self._known, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if counts.get(hashes[middle], 0) > 0:
                low = middle + 1
            else:
                high = middle
        return low

    def _evict(self, count: int) -> None:
        """Evict this number of kept blocks, the earliest released first."""
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
