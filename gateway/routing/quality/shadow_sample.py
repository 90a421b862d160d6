"""A sample of the prompts of users, which the quality watch repeats on every replica."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Sequence

#: Tokens of a prompt that is repeated. Longer ones would cost every replica too much.
MAX_TOKENS = 2048


class ShadowSample:
    """A uniform sample of `size` prompts per model, since it was last taken."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._prompts: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._seen: dict[str, int] = defaultdict(int)

    def record(self, model: str, ids: bytes) -> None:
        """Record a prompt, as token ids (INT32)."""
        if not self._size or len(ids) > 4 * MAX_TOKENS:
            return
        self._seen[model] += 1
        at = random.randrange(self._seen[model])
        if at < self._size:
            kept = self._prompts[model]
            if len(kept) == self._size:
                kept.pop(at)
            kept.append(tuple(array("i", ids)))

    def take(self, model: str) -> Sequence[tuple[int, ...]]:
        """Return the sample and start the next one."""
        self._seen.pop(model, None)
        return self._prompts.pop(model, [])
