"""Waiting with an end: what is cancelled is over, on every Python."""

import asyncio

import pytest

from llmops.clocks import wait_with_timeout

GENEROUS = 60


@pytest.mark.parametrize("error", [None, ConnectionError("gone")])
async def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost(error):
    """`asyncio.wait_for` of Python 3.10 and 3.11 returns then, or raises the work's own error."""
    waiting: asyncio.Task[int]

    async def work() -> int:
        waiting.cancel()
        if error is not None:
            raise error
        return 1

    waiting = asyncio.create_task(wait_with_timeout(GENEROUS, work()))
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_takes_too_long_has_ended_when_that_is_told():
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(GENEROUS)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        await wait_with_timeout(0.01, work())
    assert ended
