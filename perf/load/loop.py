"""The event loop of the load generator."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on uvloop where there is one: it halves the load generator's own CPU."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    loop = uvloop.new_event_loop()
    try:
        return _run(loop, main)
    finally:
        loop.close()


def _run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, T]) -> T:
    task = loop.create_task(main)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        raise
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
