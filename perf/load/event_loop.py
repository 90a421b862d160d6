"""The event loop of the load generator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_local = threading.local()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on uvloop where there is one: it halves the load generator's own CPU.

    Each thread has one loop for all its calls: grpc's poller stays with the loop it first saw, a second one fails.
    """
    loop: asyncio.AbstractEventLoop | None = getattr(_local, "loop", None)
    if loop is None:
        loop = _local.loop = _new_loop()
    task = loop.create_task(main)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        raise
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
