"""Checks of step streams: order, cancel, rejection, resume, window, unknown ids, and drain.

The check of drain ends the deployment.
"""

import asyncio
from collections.abc import Awaitable, Callable

from llmops.contract import (
    CANCELLED_FLAG,
    DRAINING_PREFIX,
    ERROR_FLAG,
    LAST_OF_SLOT,
    MAX_UNACKNOWLEDGED_STEPS,
    REQUEST_OUTPUT_LEN,
    STEP_TRANSPORT,
    UNKNOWN_SUBSCRIPTION,
)
from llmops.perf.verify.contract.cancellation import IN_FLIGHT
from llmops.perf.verify.contract.subscriber import ReceivedStep, Subscriber
from llmops.perf.verify.engine_context import PLAIN, EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, assume, check, expect, refused, unseen, works

CHECKS: list[VerifyCheck] = []
#: Checks that run last, and only on a Triton that was started for the checks.
DRAIN: list[VerifyCheck] = []
Check = Callable[[EngineContext], Awaitable[Finding]]


def _step_check(name: str, checks: list[VerifyCheck] = CHECKS) -> Callable[[Check], Check]:
    """Return a decorator that adds a check for engines that announce step streams."""

    def add(function: Check) -> Check:
        async def run(engine: EngineContext) -> Finding:
            if STEP_TRANSPORT not in engine.metadata.transports:
                return refused("only per-request streams are announced")
            return await function(engine)

        return check(checks, name)(run)

    return add


def _tokens(steps: list[ReceivedStep], slot: int) -> list[int]:
    return [token for step in steps for entry in step.entries if entry.slot == slot for token in entry.tokens]


def _in_order(steps: list[ReceivedStep]) -> None:
    found = [step.index for step in steps]
    expected = list(range(1, 1 + len(steps)))
    expect(found == expected, f"step indices are {found[:6]}… instead of 1, 2, 3 …")


@_step_check("step stream: order")
async def order(engine: EngineContext) -> Finding:
    async with Subscriber(engine) as stream:
        await stream.submit((1, PLAIN), (2, engine.metadata.max_seq_len), (3, PLAIN))
        steps = await stream.until_done({1, 2, 3})
    _in_order(steps)
    for slot in (1, 3):
        found = _tokens(steps, slot)
        expect(
            found == engine.plain,
            f"slot {slot} got {len(found)} tokens, which differ from the tokens of the same request alone",
        )
    failed = [entry for step in steps for entry in step.entries if entry.slot == 2]
    expect(len(failed) == 1 and failed[0].flags & ERROR_FLAG, "a slot that cannot be honoured got no error entry")
    expect(
        failed[0].error.startswith(f"{REQUEST_OUTPUT_LEN}:"),
        f"the error in the step stream does not name its tensor: {failed[0].error!r}",
    )
    return works(f"{len(steps)} steps for 2 × {PLAIN} tokens, and a refusal in its slot")


@_step_check("step stream: cancel")
async def cancel(engine: EngineContext) -> Finding:
    new = engine.room(512)
    async with Subscriber(engine) as stream:
        await stream.submit((1, new))
        before: list[ReceivedStep] = []
        while len(_tokens(before, 1)) < 3:
            before.append(await stream.step())
        await stream.cancel(1)
        await stream.submit((2, 4))
        after = await stream.until_done({1, 2})
    (last,) = [entry for step in after for entry in step.entries if entry.slot == 1 and entry.flags & LAST_OF_SLOT]
    if not last.flags & CANCELLED_FLAG:
        expect(len(_tokens(before + after, 1)) == new, "the slot ended without the cancelled flag")
        return unseen("the engine was done before it could be cancelled")
    # The request submitted after the cancel shows in which message the engine had received both,
    # regardless of the delay of messages. That message may have tokens of several earlier steps.
    heard = next(at for at, step in enumerate(after) if any(entry.slot == 2 for entry in step.entries))
    late = len(_tokens(after[heard + 1 :], 1))
    expect(late <= IN_FLIGHT, f"{late} more tokens came after the engine had received the cancel")
    expect(
        _tokens(after, 2) == engine.plain[:4],
        "the slot after a cancelled slot got other tokens than the same request alone",
    )
    return works(f"{late} more tokens came after the cancel")


@_step_check("step stream: resume")
async def resume(engine: EngineContext) -> Finding:
    async with Subscriber(engine) as stream:
        await stream.submit((1, PLAIN))
        result: list[ReceivedStep] = []
        while len(result) < 5 and len(_tokens(result, 1)) < PLAIN:
            result.append(await stream.step())
        await stream.leave()
        await stream.connect(resume_from=result[-1].index)
        open_slots = set() if any(e.flags & LAST_OF_SLOT for s in result for e in s.entries) else {1}
        result += await stream.until_done(open_slots)
    _in_order(result)
    found = _tokens(result, 1)
    expect(
        found == engine.plain,
        f"after the stream broke, {len(found)} tokens came, which differ from the request's tokens without a break",
    )
    return works("nothing lost, nothing twice")


@_step_check("step stream: unknown subscription")
async def unknown(engine: EngineContext) -> Finding:
    stream = Subscriber(engine)
    await stream.connect(resume_from=5)
    step = await stream.next(10)
    await stream.leave()
    said = "nothing" if step is None else step.error
    expect(
        step is not None and UNKNOWN_SUBSCRIPTION in said,
        f"resuming an unknown subscription got {said!r} instead of the error for it",
    )
    return works()


@_step_check("step stream: window")
async def window(engine: EngineContext) -> Finding:
    new = engine.room(MAX_UNACKNOWLEDGED_STEPS + 12)
    assume(
        new >= MAX_UNACKNOWLEDGED_STEPS + 8,
        f"the context of {engine.metadata.max_seq_len} tokens is too short to fill a window of "
        f"{MAX_UNACKNOWLEDGED_STEPS} steps",
    )
    async with Subscriber(engine) as stream:
        await stream.submit((1, new))
        alive = asyncio.create_task(_keep_alive(stream))
        try:
            steps = [step for step in await _first(stream, MAX_UNACKNOWLEDGED_STEPS) if step.index]
            if any(entry.flags & LAST_OF_SLOT for step in steps for entry in step.entries):
                return unseen(f"the engine gives several tokens a step: {len(steps)} steps for {new} tokens")
            over = await stream.next(1.0)
            expect(
                over is None,
                f"step {MAX_UNACKNOWLEDGED_STEPS + 1} came although none of {MAX_UNACKNOWLEDGED_STEPS} was "
                "acknowledged",
            )
        finally:
            alive.cancel()
        await stream.acknowledge(MAX_UNACKNOWLEDGED_STEPS)
        steps += await stream.until_done({1})
    _in_order(steps)
    found = _tokens(steps, 1)
    expect(len(found) == new, f"{new} tokens were asked for, {len(found)} came through a full window")
    expect(found[:PLAIN] == engine.plain, "the tokens differ from those of the same request alone")
    return works(f"held at {MAX_UNACKNOWLEDGED_STEPS} steps, then {new} tokens in {len(steps)}")


async def _first(stream: Subscriber, count: int) -> list[ReceivedStep]:
    steps: list[ReceivedStep] = []
    while len(steps) < count:
        steps.append(await stream.step())
        if any(entry.flags & LAST_OF_SLOT for entry in steps[-1].entries):
            break
    return steps


async def _keep_alive(stream: Subscriber) -> None:
    """Send an acknowledgement without new steps, as a live but slow gateway does."""
    while True:
        await asyncio.sleep(1.0)
        await stream.acknowledge(0)


@_step_check("step stream: drain", DRAIN)
async def drain(engine: EngineContext) -> Finding:
    async with Subscriber(engine) as stream:
        await stream.submit((1, engine.room(32)))
        first = await stream.step()
        await engine.probe.ask([0], 1, drain=True)
        late = await engine.same(2)
        expect(
            str(late.error).startswith(f"{DRAINING_PREFIX}:"),
            f"a request after `drain` got {late.error or 'an answer'!r} instead of the error for it",
        )
        steps = [first, *await stream.until_done({1})]
        expect(len(_tokens(steps, 1)) == engine.room(32), "a request that was running when `drain` came did not finish")
        end = await stream.next(10)
    expect(end is not None and end.index == 0, "the subscription did not end after the last request")
    return works("running requests finish, new ones are refused, the subscription ends")
