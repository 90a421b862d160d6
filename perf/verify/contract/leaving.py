"""Leaving early: a client's cancel and `stop` by id free the batch and the KV cache."""

from __future__ import annotations

import asyncio
import time

from llmops.perf.verify.base import Check, Finding, check, expect, unseen, works
from llmops.perf.verify.desk import Desk
from llmops.perf.verify.gauges import BLOCKS, REQUESTS
from llmops.perf.verify.probe import Heard

CHECKS: list[Check] = []
_LONG, _AFTER = 512, 3
# seconds: a cancel is looked for every 50 ms, and gauges are published every 100 ms
_SOON = 2.0
ITERATIONS = ("nv_trt_llm_general_metrics", "iteration_counter")


@check(CHECKS, "cancel frees batch and blocks")
async def cancel(desk: Desk) -> Finding:
    new, before = desk.room(_LONG), await _idle(desk)
    if before is None or desk.gauges is None:
        return unseen("no metrics of this engine could be read; name Triton's metrics page with --metrics URL")
    leaving = asyncio.Event()
    running = asyncio.create_task(desk.same(new, on_response=lambda so_far: leaving.is_set()))
    # the gauges lag: only what was seen in the batch can be seen to have left it
    inside = await desk.gauges.wait_for(lambda now: now.get((REQUESTS, "active"), 0) > 0 or running.done(), _SOON)
    leaving.set()
    heard, left = await running, time.monotonic()
    expect(heard.error is None, f"the request failed: {heard.error}")
    if not inside or not heard.cancelled or len(heard.ids) > new - 8:
        return unseen("the engine was done before it could be cancelled")
    gone = await desk.gauges.wait_for(lambda now: now.get((REQUESTS, "active"), 1) == 0, _SOON)
    expect(gone, f"{_SOON:.0f} s after its client had left, the request is still in the batch")
    seconds = time.monotonic() - left
    after = await desk.gauges.read()
    used = (BLOCKS, "used")
    # blocks that the prefix cache keeps for the next request are not free in every runtime's books
    leaked = after.get(used, 0) - before.get(used, 0)
    per = max(1.0, after.get((BLOCKS, "tokens_per"), 32))
    most = (len(desk.prompt) + len(heard.ids)) / per + 2
    expect(leaked <= most, f"{leaked:.0f} KV blocks more are in use after a cancelled request than before it")
    return works(f"gone {1000 * seconds:.0f} ms after {len(heard.ids)} of {new} tokens", seconds=seconds)


async def _idle(desk: Desk) -> dict[tuple[str, str], float] | None:
    """The gauges once nothing runs; None without gauges, or when others use the engine."""
    if desk.gauges is None or not await desk.gauges.read():
        return None
    await desk.gauges.wait_for(lambda now: now.get((REQUESTS, "active"), 0) == 0, _SOON)
    return await desk.gauges.read()


@check(CHECKS, "stop by request id")
async def stop(desk: Desk) -> Finding:
    new, name = desk.room(_LONG), f"verify-stop-{time.monotonic_ns()}"
    enough, counted = asyncio.Event(), 0

    def watch(heard: Heard) -> bool:
        nonlocal counted
        counted = len(heard.ids)
        if counted >= _AFTER:
            enough.set()
        return False

    running = asyncio.create_task(desk.probe.ask(desk.prompt, new, watch, name))
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        return unseen(f"all {len((await running).ids)} tokens came before it could be stopped")
    await desk.probe.stop(name)
    said = counted
    heard = await running
    expect(heard.error is None, f"a stopped request ends with an error: {heard.error}")
    if len(heard.ids) == new and said > new - 8:
        return unseen("the engine was done before it could be stopped")
    expect(len(heard.ids) < new, "a second request with its id and `stop` did not end the request")
    expect(heard.finals == 1, "a stopped request has no final flag")
    expect(len(heard.ids) - said <= 8, f"{len(heard.ids) - said} tokens more came after `stop` was answered")
    return works(f"ended after {len(heard.ids)} of {new} tokens")
