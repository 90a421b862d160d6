"""Checks of an engine's reports about its KV cache: gauges and events."""

import asyncio
import random
import time

from llmops.perf.verify.contract.subscriber import Subscriber
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, assume, check, expect, refused, unseen, works

CHECKS: list[VerifyCheck] = []
_USED = ("nv_trt_llm_kv_cache_block_metrics", "used")
#: Number of tokens that are generated while the gauge is watched, which fill several blocks of any
#: usual size.
_LONG = 400
#: Number of prompt tokens whose blocks must be reported: at least one block of any usual size.
_PROMPT = 96
#: Number of prompts whose events must arrive. An engine whose reader ends at the first empty read
#: reports at most the first prompt's.
_ROUNDS = 2
_PATIENCE = 10.0


@check(CHECKS, "KV gauges")
async def gauges(engine: EngineContext) -> Finding:
    if engine.gauges is None:
        return unseen("Triton's metrics port was not given")
    before = await engine.gauges.read()
    assume(_USED in before, "this engine reports no blocks of its KV cache")
    new = engine.room(_LONG)
    seen: set[float] = {before[_USED]}
    end = time.monotonic() + _PATIENCE
    # The engine is kept busy, because the answer of a fast engine ends before the gauges are read.
    while len(seen) < 2 and time.monotonic() < end:
        running = asyncio.create_task(engine.same(new))
        while not running.done():
            seen.add((await engine.gauges.read()).get(_USED, before[_USED]))
            await asyncio.sleep(0.02)
        await running
    assume(len(seen) > 1 or new >= _LONG, f"the context has room for {new} tokens only, which may not fill a block")
    expect(
        len(seen) > 1,
        f"{_USED[0]} says {before[_USED]:.0f} used blocks before and while answers of {new} tokens are generated for "
        f"{_PATIENCE:.0f} s: the engine's reader of statistics has stopped; start the server again, and report "
        "this as a bug of the engine",
    )
    return works(f"{len(seen)} values while {new} tokens were generated")


@check(CHECKS, "KV events")
async def events(engine: EngineContext) -> Finding:
    if not engine.metadata.kv_events:
        return refused("not announced")
    size = min(_PROMPT, engine.metadata.max_seq_len // 2)
    assume(size >= _PROMPT, f"the context of {engine.metadata.max_seq_len} tokens may not hold a whole block")
    stored: list[int] = []
    async with Subscriber(engine, watch=True) as stream:
        # Read the events of blocks that are stored already, which come first.
        await stream.stored(1.0)
        for number in range(1, _ROUNDS + 1):
            prompt = [random.randrange(3, engine.metadata.vocab_size) for _ in range(size)]
            await engine.same(1, prompt)
            found = await stream.stored(_PATIENCE)
            # From a tenant's first request on, OpenVINO's prefix cache is off and sends no events.
            has_cache = found or stored or engine.metadata.target != "openvino"
            assume(
                has_cache,
                "the engine sent no KV-cache events: its prefix cache is off, because tenants must not share one",
            )
            expect(
                found,
                f"KV events are announced, and none came for the new prompt number {number}: gateways would route by "
                "estimates; start the server again, and report this as a bug of the engine",
            )
            stored.append(found)
    return works(f"{' and '.join(map(str, stored))} blocks of new prompts")
