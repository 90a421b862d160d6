"""Checks that the engine has the capacity of its plan and of engine.json."""

from typing import Any

from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS as BLOCKS
from llmops.gateway.telemetry.metric_definitions import ENGINE_REQUESTS as REQUESTS
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, assume, check, expect, works, wrong

CHECKS: list[VerifyCheck] = []
#: Lowest acceptable share of the planned KV cache. The memory of CUDA graphs and NCCL is not known
#: exactly.
ENOUGH = 0.9


def promised(engine: EngineContext) -> tuple[dict[str, Any], str]:
    """Return the promised limits, and the name of the document that promises them."""
    if engine.manifest is None:
        return {}, ""
    return (
        {**engine.manifest.limits.model_dump(), **(engine.manifest.plan or {})},
        "the plan" if engine.manifest.plan else "engine.json",
    )


@check(CHECKS, "batch")
async def batch(engine: EngineContext) -> Finding:
    plan, who = promised(engine)
    now = await engine.gauges.read() if engine.gauges else {}
    reported = now.get((REQUESTS, "max"))
    found = int(reported) if reported else engine.metadata.max_batch_size
    assume(plan, f"{found} requests at once; give the engine folder (--engine) to compare with the promised number")
    expected = plan["max_batch_size"]
    return _at_least("requests in a batch", found, expected, who, "max_batch_size of the engine or its Triton model")


@check(CHECKS, "context")
async def context(engine: EngineContext) -> Finding:
    plan, who = promised(engine)
    limit = engine.metadata.max_seq_len
    assume(plan, f"{limit:,} tokens; give the engine folder (--engine) to compare with the promised number")
    expected = plan["max_seq_len"]
    room = limit - len(engine.prompt) + 1
    result = await engine.same(4, request_output_len=room)
    expect(result.error is not None, f"a request beyond the context of {limit} tokens was accepted")
    return _at_least("tokens of context", limit, expected, who, "max_seq_len")


@check(CHECKS, "KV cache")
async def kv_cache(engine: EngineContext) -> Finding:
    now = await engine.gauges.read() if engine.gauges else {}
    blocks, per = now.get((BLOCKS, "max"), 0), now.get((BLOCKS, "tokens_per"), 0)
    assume(blocks and per, "the engine's metrics have no number of KV blocks")
    tokens = blocks * per
    said = f"{blocks:,.0f} blocks of {per:.0f} tokens: {tokens:,.0f} tokens"
    expected, longest = planned_tokens(engine), engine.metadata.max_seq_len
    if expected is None and tokens < longest:
        # 1.2.1 batch_manager/trtGptModelInflightBatching.cpp, clampWindowSizesToFitAtLeastOneSequence;
        # _torch/pyexecutor/_util.py, KvCacheCreator: "modifies the max_seq_len field"
        return wrong(
            f"{said}, less than one sequence of max_seq_len {longest:,}: TensorRT-LLM then ends sequences earlier and "
            "only logs it; build with a smaller --max-seq-len, or give the cache more memory",
            tokens=tokens,
        )  # fmt: skip
    if expected is None:
        return works(f"{said} (the engine was built without a plan)", tokens=tokens)
    if tokens < ENOUGH * expected:
        return wrong(
            f"{said}, but the plan has {expected:,.0f}: another process holds GPU memory, "
            "kv_cache_free_gpu_mem_fraction is lower than planned, or max_tokens_in_paged_kv_cache is set",
            tokens=tokens, planned=expected,
        )  # fmt: skip
    return works(f"{said}, {tokens / expected:.2f} of the plan's", tokens=tokens, planned=expected)


def planned_tokens(engine: EngineContext) -> float | None:
    """Return the planned size of a replica's KV cache in tokens, or None without a plan."""
    predicted = (engine.manifest.plan or {}).get("predicted", {}) if engine.manifest else {}
    cache, token = predicted.get("kv_cache_bytes_per_gpu"), predicted.get("kv_bytes_per_token")
    return cache / token if cache and token else None


def _at_least(what: str, found: int, expected: int, who: str, where: str) -> Finding:
    if found < expected:
        return wrong(f"{found:,} {what}, but {who} has {expected:,}: see {where}", found=found, planned=expected)
    return works(f"{found:,} {what}, but {who} has {expected:,}", found=found, planned=expected)
