"""The index of the prefixes in the caches of replicas, as far as this gateway knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

#: Maximum number of blocks in the index, which bounds the memory: a block takes about 100 bytes.
MAX_ENTRIES = 200_000


def tenant_cache_salt(tenant: str) -> int:
    """Return the salt that separates a tenant's cached blocks from other tenants' blocks.

    Callers without a tenant share the salt 0.
    """
    return xxh3_64_intdigest(tenant.encode()) if tenant else 0


#: The number of leading blocks of a prompt, and the replicas that hold these blocks, as a bit set
#: of replica numbers.
CachedPrefix = tuple[int, int]


class PrefixIndex:
    """A map from block hash to the bit set of the replicas that hold the block.

    The map keeps about the `entries` most recently used blocks. Two generations approximate the
    order of use: an entry that is used moves from the old to the young generation. When the young
    generation is full, it becomes the old generation, and the entries of the previous old
    generation are forgotten.
    """

    def __init__(self, entries: int = MAX_ENTRIES) -> None:
        self._half = max(1, entries // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        # Entries keep the bits of replicas that are gone. The number of such a replica is free
        # again after both generations were replaced.
        self._live = 0
        self._turns = 0
        self._resting: list[tuple[int, int]] = []
        # for replicas that report no evictions: their blocks, the least recently used first, and
        # the maximum number of blocks
        self._recent: dict[str, OrderedDict[int, None]] = {}
        self._limits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def held(self, hashes: Sequence[int]) -> list[CachedPrefix]:
        """Return the length of the prompt's prefix on each replica, the longest first.

        Replicas that hold no part of the prefix are left out.
        """
        young, old, alive = self._young, self._old, self._live
        found: list[CachedPrefix] = []
        same = -1
        for depth, name in enumerate(hashes):
            bits = young.get(name)
            if bits == same:
                continue
            if bits is None:
                # moving an entry drops the bits of replicas that are gone, so that their numbers
                # become free
                bits = old.pop(name, 0) & self._live
                if bits:
                    young[name] = bits
            both = bits & alive
            if both != alive:
                if depth:
                    found.append((depth, alive & ~both))
                if not both:
                    break
                alive = both
            same = bits
        else:
            if alive and hashes:
                found.append((len(hashes), alive))
        found.reverse()
        return found

    def store(self, replica_id: str, hashes: Sequence[int]) -> None:
        bit = 1 << self._number(replica_id)
        young, old, live = self._young, self._old, self._live
        for name in hashes:
            young[name] = (young.get(name) or old.pop(name, 0) & live) | bit
        if len(young) >= self._half:
            self._old, self._young = young, {}
            self._turns += 1
        if replica_id in self._limits:
            self._use(replica_id, hashes)

    def limit(self, replica_id: str, blocks: int) -> None:
        """Forget all except the `blocks` most recently stored blocks of a replica.

        The limit also applies to each later `store`.
        """
        self._limits[replica_id] = blocks
        self._use(replica_id, ())

    def has_limit(self, replica_id: str) -> bool:
        """Return True if the index keeps a limited number of the replica's blocks.

        The blocks of such a replica must be stored again whenever they are used, to be kept.
        """
        return replica_id in self._limits

    def _use(self, replica_id: str, hashes: Sequence[int]) -> None:
        recent = self._recent.setdefault(replica_id, OrderedDict())
        # store a prompt's end first, so that it is evicted first: without the beginning, the rest
        # is not found
        for name in reversed(hashes):
            recent[name] = None
            recent.move_to_end(name)
        over = len(recent) - self._limits[replica_id]
        if over > 0:
            self.remove(replica_id, [recent.popitem(last=False)[0] for _ in range(over)])

    def remove(self, replica_id: str, hashes: Sequence[int]) -> None:
        number = self._numbers.get(replica_id)
        if number is None:
            return
        others = ~(1 << number)
        for name in hashes:
            generation = self._young if name in self._young else self._old
            bits = generation.get(name, 0) & others
            if bits:
                generation[name] = bits
            else:
                generation.pop(name, None)

    def forget(self, replica_id: str) -> None:
        """Forget all blocks of a replica, in constant time."""
        self._recent.pop(replica_id, None)
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            del self._names[number]
            self._live &= ~(1 << number)
            self._resting.append((self._turns, number))

    def bit(self, replica_id: str) -> int:
        """Return the bit of a replica, or 0 if the index has nothing about the replica."""
        number = self._numbers.get(replica_id)
        return 0 if number is None else 1 << number

    def names(self, bits: int) -> list[str]:
        """Return the replicas in a bit set."""
        found = []
        while bits:
            highest = bits.bit_length() - 1
            found.append(self._names[highest])
            bits ^= 1 << highest
        return found

    def _number(self, replica_id: str) -> int:
        known = self._numbers.get(replica_id)
        if known is not None:
            return known
        if self._resting and self._resting[0][0] + 2 <= self._turns:
            number = self._resting.pop(0)[1]
        else:
            number = len(self._names) + len(self._resting)
        self._numbers[replica_id] = number
        self._names[number] = replica_id
        self._live |= 1 << number
        return number
