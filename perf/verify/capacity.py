"""Checks of the engine's capacity against the plan and engine.json."""

from __future__ import annotations

from typing import Any

from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS as BLOCKS
from llmops.gateway.telemetry.metric_definitions import ENGINE_REQUESTS as REQUESTS
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, check, expect, unseen, works, wrong

CHECKS: list[VerifyCheck] = []
#: Least share of the planned KV cache: the memory of CUDA graphs and NCCL is not known exactly.
ENOUGH = 0.9


def promised(desk: EngineContext) -> tuple[dict[str, Any], str]:
    """Return the limits and the document that promises them."""
    if desk.manifest is None:
        return {}, ""
    return (
        {**desk.manifest.limits.model_dump(), **(desk.manifest.plan or {})},
        "the plan" if desk.manifest.plan else "engine.json",
    )


@check(CHECKS, "batch")
async def batch(desk: EngineContext) -> Finding:
    plan, who = promised(desk)
    now = await desk.gauges.read() if desk.gauges else {}
    reported = now.get((REQUESTS, "max"))
    found = int(reported) if reported else desk.card.max_batch_size
    if not plan:
        return unseen(
            f"{found} requests at once; without the engine folder (--engine) nothing says how many it should be"
        )
    wanted = plan["max_batch_size"]
    return _at_least("requests in a batch", found, wanted, who, "max_batch_size of the engine or its Triton model")


@check(CHECKS, "context")
async def context(desk: EngineContext) -> Finding:
    plan, who = promised(desk)
    if not plan:
        return unseen(f"{desk.card.max_seq_len:,} tokens; without the engine folder nothing says how many it should be")
    wanted = plan["max_seq_len"]
    room = desk.card.max_seq_len - len(desk.prompt) + 1
    heard = await desk.same(4, request_output_len=room)
    expect(heard.error is not None, f"a request beyond the context of {desk.card.max_seq_len} tokens was accepted")
    return _at_least("tokens of context", desk.card.max_seq_len, wanted, who, "max_seq_len")


@check(CHECKS, "KV cache")
async def kv_cache(desk: EngineContext) -> Finding:
    now = await desk.gauges.read() if desk.gauges else {}
    blocks, per = now.get((BLOCKS, "max"), 0), now.get((BLOCKS, "tokens_per"), 0)
    if not blocks or not per:
        return unseen("the engine's metrics say nothing of its KV blocks")
    tokens = blocks * per
    said = f"{blocks:,.0f} blocks of {per:.0f} tokens: {tokens:,.0f} tokens"
    wanted = planned_tokens(desk)
    if wanted is None:
        return works(f"{said} (the engine was built without a plan)", tokens=tokens)
    if tokens < ENOUGH * wanted:
        return wrong(
            f"{said}, the plan counts on {wanted:,.0f}: another process holds GPU memory, "
            "kv_cache_free_gpu_mem_fraction is lower than planned, or max_tokens_in_paged_kv_cache is set",
            tokens=tokens, planned=wanted,
        )  # fmt: skip
    return works(f"{said}, {tokens / wanted:.2f} of the plan's", tokens=tokens, planned=wanted)


def planned_tokens(desk: EngineContext) -> float | None:
    """Return the planned tokens of a replica's KV cache, or None without a plan of it."""
    predicted = (desk.manifest.plan or {}).get("predicted", {}) if desk.manifest else {}
    cache, token = predicted.get("kv_cache_bytes_per_gpu"), predicted.get("kv_bytes_per_token")
    return cache / token if cache and token else None


def _at_least(what: str, found: int, wanted: int, who: str, where: str) -> Finding:
    if found < wanted:
        return wrong(f"{found:,} {what}, {who} says {wanted:,}: see {where}", found=found, planned=wanted)
    return works(f"{found:,} {what}, {who} says {wanted:,}", found=found, planned=wanted)
