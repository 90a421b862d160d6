"""Tasks of a process that ends."""

import asyncio
import contextlib

from llmops import background


async def test_a_library_that_swallows_a_cancellation_does_not_keep_a_process_from_its_end(monkeypatch):
    """redis-py does, once in some 80 stops of a busy gateway, which then hung."""
    monkeypatch.setattr(background, "CANCEL_INTERVAL", 0.01)

    async def swallow():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = asyncio.create_task(swallow())
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await background.cancel_tasks(task, None)
    assert task.cancelled()
