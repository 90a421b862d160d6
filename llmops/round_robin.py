"""A queue in which those who ask take turns: of the gateway, and beside the models inside Triton (`llmops_round_robin`)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobinQueue(Generic[T]):
    """First come, first served for one; one of each in turn for several. A path of names says who asks: within the
    turns of its first name the second names take turns, and so on. `size`: how many wait."""

    def __init__(self) -> None:
        self.size = 0
        self._own: deque[T] = deque()
        self._others: OrderedDict[str, RoundRobinQueue[T]] = OrderedDict()

    def put(self, path: Sequence[str], item: T) -> None:
        self.size += 1
        if not path:
            self._own.append(item)
            return
        self._others.setdefault(path[0], RoundRobinQueue()).put(path[1:], item)

    def take(self) -> T:
        """Raises IndexError when nobody waits."""
        if self._own or not self._others:
            item = self._own.popleft()
            self.size -= 1
            return item
        name, turns = self._others.popitem(last=False)
        item = turns.take()
        if turns.size:
            self._others[name] = turns
        self.size -= 1
        return item

    def waiting(self, name: str) -> int:
        """How many of `name` wait."""
        return self._others[name].size if name in self._others else 0
