"""A queue that serves its callers in turn, for the gateway and for models inside Triton.

`llmops repo` copies the module beside these models, as `llmops_round_robin.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobinQueue(Generic[T]):
    """A queue that is first-in, first-out per caller and round-robin between callers.

    A caller is a path of names such as (`tenant`, `user`). The rotation is nested: tenants take
    turns, and within the turns of a tenant its users take turns. The caller that was served last
    goes behind the callers that came meanwhile.

    Attributes:
        size: The number of items in the queue.
    """

    def __init__(self) -> None:
        self.size = 0
        self._items: deque[T] = deque()
        self._queues: OrderedDict[str, RoundRobinQueue[T]] = OrderedDict()
        self._served = ""

    def put(self, path: Sequence[str], item: T) -> None:
        """Add an item of the caller `path`."""
        self.size += 1
        if not path:
            self._items.append(item)
            return
        self._queues.setdefault(path[0], RoundRobinQueue()).put(path[1:], item)

    def take(self) -> T:
        """Remove and return the next item. Raise IndexError if the queue is empty."""
        if self._items or not self._queues:
            item = self._items.popleft()
            self.size -= 1
            return item
        if self._served in self._queues:
            self._queues.move_to_end(self._served)
        self._served = name = next(iter(self._queues))
        item = self._queues[name].take()
        if not self._queues[name].size:
            del self._queues[name]
        self.size -= 1
        return item

    def waiting(self, name: str) -> int:
        """Return the number of items whose path begins with `name`."""
        return self._queues[name].size if name in self._queues else 0
