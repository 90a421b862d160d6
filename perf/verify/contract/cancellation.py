"""Checks that a cancellation and a `stop` request free the batch and the KV cache."""

import asyncio
import time

from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS as BLOCKS
from llmops.gateway.telemetry.metric_definitions import ENGINE_REQUESTS as REQUESTS
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, assume, check, expect, unseen, works
from llmops.perf.verify.probe import ProbeResponse

CHECKS: list[VerifyCheck] = []
_CANCELLED, _STOPPED, _AFTER = 2048, 512, 3
#: Seconds after which a cancelled request must have left the batch, also on a busy host.
_PATIENCE = 30.0
#: Minimum seconds to wait for a cancelled request to leave the batch, because gauges are published
#: every 100 ms and engines poll for cancellations every 50 ms.
_LEAST = 1.0
#: Maximum number of tokens that may still arrive, because the engine continues while a message
#: travels.
IN_FLIGHT = 8
#: Seconds in which tokens may still arrive that a busy client has not read yet.
_UNREAD = 0.5


class TokenPace:
    """A meter of the seconds between two tokens of an answer, from the arrival of its responses."""

    def __init__(self) -> None:
        self._first, self._before, self.gap = 0.0, 0, _PATIENCE

    def record(self, so_far: ProbeResponse) -> bool:
        """Record the arrival of a response. Return True, for use in a condition."""
        now, count = time.monotonic(), len(so_far.ids)
        if not self._before:
            self._first, self._before = now, count
        elif count > self._before:
            self.gap = max(1e-6, now - self._first) / (count - self._before)
        return True


@check(CHECKS, "cancel frees batch and blocks")
async def cancel(engine: EngineContext) -> Finding:
    new, before, pace = engine.room(_CANCELLED), await _idle(engine), TokenPace()
    if before is None or engine.gauges is None:
        return unseen("no metrics of this engine could be read; name Triton's metrics page with --metrics URL")
    leaving = asyncio.Event()
    running = asyncio.create_task(engine.same(new, on_response=lambda so_far: pace.record(so_far) and leaving.is_set()))
    # Gauges lag behind, so the departure of a request is visible only if the request was seen in
    # the batch.
    inside = await engine.gauges.wait_for(lambda now: now.get((REQUESTS, "active"), 0) > 0 or running.done(), _PATIENCE)
    leaving.set()
    result, left = await running, time.monotonic()
    expect(result.error is None, f"the request failed: {result.error}")
    was_cancelled = inside and result.cancelled and len(result.ids) <= new - 8
    assume(was_cancelled, "the engine finished before the request could be cancelled")
    # Wait at most half of the time that the remaining tokens would have taken, because after that
    # time the request would have ended anyway.
    patience = min(_PATIENCE, (new - len(result.ids)) * pace.gap / 2)
    gone = await engine.gauges.wait_for(lambda now: now.get((REQUESTS, "active"), 1) == 0, patience)
    assume(gone or patience >= _LEAST, f"all {new} tokens take too little time to tell a cancel from an end")
    expect(gone, f"{patience:.1f} s after its client had left, the request is still in the batch")
    seconds = time.monotonic() - left
    after = await engine.gauges.read()
    used = (BLOCKS, "used")
    # Some runtimes count the blocks that the prefix cache keeps as blocks in use, so the blocks of
    # this request's own tokens are allowed.
    leaked = after.get(used, 0) - before.get(used, 0)
    per = max(1.0, after.get((BLOCKS, "tokens_per"), 32))
    most = (len(engine.prompt) + len(result.ids)) / per + 2
    expect(leaked <= most, f"{leaked:.0f} more KV blocks are in use after a cancelled request than before")
    return works(f"gone {1000 * seconds:.0f} ms after {len(result.ids)} of {new} tokens", seconds=seconds)


async def _idle(engine: EngineContext) -> dict[tuple[str, str], float] | None:
    """Return the gauges once no request runs or the time is over, or None without gauges."""
    if engine.gauges is None or not await engine.gauges.read():
        return None
    await engine.gauges.wait_for(lambda now: now.get((REQUESTS, "active"), 0) == 0, _PATIENCE)
    return await engine.gauges.read()


@check(CHECKS, "stop by request id")
async def stop(engine: EngineContext) -> Finding:
    new, name = engine.room(_STOPPED), f"verify-stop-{time.monotonic_ns()}"
    enough, counted, pace = asyncio.Event(), 0, TokenPace()

    def watch(result: ProbeResponse) -> bool:
        nonlocal counted
        pace.record(result)
        counted = len(result.ids)
        if counted >= _AFTER:
            enough.set()
        return False

    running = asyncio.create_task(engine.probe.ask(engine.prompt, new, watch, name))
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        return unseen(f"all {len((await running).ids)} tokens came before it could be stopped")
    begun = time.monotonic()
    await engine.probe.stop(name)
    said, answered = counted, time.monotonic() - begun
    result = await running
    over = time.monotonic() - begun - answered
    expect(result.error is None, f"a stopped request ends with an error: {result.error}")
    assume(len(result.ids) != new or said <= new - 8, "the engine finished before the request could be stopped")
    expect(len(result.ids) < new, "a second request with its id and `stop` did not end the request")
    expect(result.finals == 1, "a stopped request has no final flag")
    # Tokens of one round trip are on their way when the reply to `stop` arrives.
    late, most = len(result.ids) - said, IN_FLIGHT + answered / pace.gap
    expect(
        late <= most or over <= _UNREAD,
        f"{late} more tokens came after the reply to `stop`, although at most {most:.0f} can have been under way",
    )
    return works(f"ended after {len(result.ids)} of {new} tokens")
