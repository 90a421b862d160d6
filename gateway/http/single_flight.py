"""Work that many clients may ask for at once, done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """The result of an asynchronous function, which runs once at a time and at most `per_second` times each second.

    Callers who come while it runs get that run's result; callers beyond `per_second` get the last one.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], per_second: int) -> None:
        self._make, self._per_second = make, per_second
        self._second, self._left = -1, 0
        self._last: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the result. Raises whatever the function raised."""
        second = int(monotonic())
        if second != self._second:
            self._second, self._left = second, self._per_second
        last = self._last
        if last is None or (last.done() and self._left > 0):
            self._left -= 1
            last = self._last = asyncio.ensure_future(self._run())
        # a caller that leaves does not end what others wait for
        return await asyncio.shield(last)

    async def _run(self) -> T:
        return await self._make()
