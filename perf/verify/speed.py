"""Checks of the engine's speed: TTFT, TPOT and tokens/s.

The checks run with one stream, and at the plan's operating point.
"""

import asyncio
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS as BLOCKS
from llmops.gateway.telemetry.metric_definitions import ENGINE_REQUESTS as REQUESTS
from llmops.perf.bench import bench
from llmops.perf.options import BenchOptions
from llmops.perf.report.document import Document
from llmops.perf.report.summary import Summary
from llmops.perf.verify.capacity import ENOUGH, planned_tokens
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, WrongError, check, works, wrong
from llmops.perf.verify.host import HostGpu, gpus
from llmops.perf.workloads.lengths import parse_lengths

CHECKS: list[VerifyCheck] = []
#: Ratio of measured to predicted speed below which a check fails. The planner's predictions may be
#: off by up to 20 %.
MIN_SPEED_RATIO = 0.8
#: Load without a plan: number of streams, and tokens of each prompt and answer.
_STREAMS, _INPUT, _OUTPUT = 8, 64, 32
#: Seconds in which the requests of a measurement start, without and with a plan. The load of a plan
#: takes longer to reach its steady state.
_SECONDS, _PLANNED_SECONDS = 3.0, 20.0
#: Share of a GPU's highest clock below which power or heat limits the GPU.
_CLOCK = 0.85


@dataclass
class MeasuredSpeed:
    """The measured speed of an engine.

    Attributes:
        ttft: Mean seconds to the first token.
        tpot: Mean seconds per token after the first.
        tokens_per_second: Output tokens per second.
        requests: Number of requests.
        offered: Tokens per second that an open loop requested, or None for a closed loop.
        waiting: Number of requests outside of the engine's batch.
        gpus: The GPUs under load.
    """

    ttft: float
    tpot: float
    tokens_per_second: float
    requests: int
    offered: float | None = None
    waiting: float = 0.0
    gpus: list[HostGpu] = field(default_factory=list)


@check(CHECKS, "one stream")
async def single(engine: EngineContext) -> Finding:
    return await _compare(engine, 1, _predicted(engine).get("single"))


@check(CHECKS, "operating point")
async def operating_point(engine: EngineContext) -> Finding:
    point = _predicted(engine).get("point")
    streams = max(1, round(point["concurrency"])) if point else min(_STREAMS, engine.metadata.max_batch_size)
    return await _compare(engine, streams, point, arrivals=bool(point))


def _predicted(engine: EngineContext) -> dict[str, Any]:
    plan = (engine.manifest.plan or {}) if engine.manifest else {}
    found = plan.get("predicted") or {}
    return dict(found) if found.get("kind", "aggregated") == "aggregated" else {}


async def _compare(
    engine: EngineContext, streams: int, point: dict[str, float] | None, arrivals: bool = False
) -> Finding:
    try:
        found = await measure(engine, streams, bool(point), point["rate"] if point and arrivals else None)
    except WrongError as error:
        if not point:
            raise
        # The most likely cause is a full queue, because a slow engine rejects requests.
        nothing = MeasuredSpeed(0.0, 0.0, 0.0, 0)
        return wrong(f"{error}. First suspects: {'; '.join(await suspects(engine, streams, nothing))}")
    figures = {"ttft": found.ttft, "tpot": found.tpot, "tokens_per_second": found.tokens_per_second}
    said = (
        f"{streams} streams: TTFT {1000 * found.ttft:,.0f} ms, TPOT {1000 * found.tpot:,.1f} ms, "
        f"{found.tokens_per_second:,.0f} tokens/s"
    )
    if not point:
        return works(f"{said} (not compared: engine.json has no plan that predicts it)", **figures)
    ratios = ratios_of(found, point)
    figures |= {f"{name}_ratio": ratio for name, ratio in ratios.items()}
    said += "; of the plan's speed: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    if min(ratios.values()) < MIN_SPEED_RATIO:
        return wrong(f"{said}. First suspects: {'; '.join(await suspects(engine, streams, found))}", **figures)
    return works(said, **figures)


def ratios_of(found: MeasuredSpeed, point: dict[str, float]) -> dict[str, float]:
    """Return the ratios of measured to predicted speed.

    A ratio above 1 means faster than predicted.

    Random arrivals request slightly more or fewer tokens than planned, so throughput is compared
    with the requested tokens.
    """
    return {
        "TTFT": point["ttft"] / found.ttft,
        "TPOT": point["tpot"] / found.tpot,
        "tokens/s": found.tokens_per_second / (found.offered or point["tokens_per_second"]),
    }


async def measure(engine: EngineContext, streams: int, planned: bool, rate: float | None = None) -> MeasuredSpeed:
    """Return the speed of the engine model without gateway and HTTP.

    The load is a closed loop of `streams`, or the steady state of `rate` random arrivals per
    second, for which the planner predicts the speed. With `planned`, prompts and answers have the
    lengths of the plan.
    """
    predicted = _predicted(engine)
    isl = int(predicted.get("isl", _INPUT)) if planned else _INPUT
    osl = int(predicted.get("osl", _OUTPUT)) if planned else _OUTPUT
    room = engine.metadata.max_seq_len
    isl, osl = min(isl, max(1, room - osl - 1)), min(osl, room // 2)
    options = BenchOptions(
        f"grpc://{engine.probe.client.address}", engine.metadata.name, "engine", parse_lengths(str(isl)),
        parse_lengths(str(osl)), concurrency=None if rate else streams, rate=rate,
        warmup=min(streams, 8) if rate else streams,
        requests=2 * streams + _counted(streams) if rate else max(3, 2 * streams),
        duration=None if rate else _PLANNED_SECONDS if planned else _SECONDS,
    )  # fmt: skip
    load = asyncio.create_task(bench(options))
    waiting = 0.0
    seen: list[HostGpu] = []
    while not load.done():
        await asyncio.wait({load}, timeout=0.5)
        if not load.done():
            now = await engine.gauges.read() if engine.gauges else {}
            waiting = max(waiting, now.get((REQUESTS, "waiting"), 0.0))
            seen = await asyncio.to_thread(gpus) or seen
    document = await load
    found = _mean(document.summary) if rate is None else steady(document, streams)
    found.waiting, found.gpus = waiting, seen
    return found


def _counted(streams: int) -> int:
    """Return the number of answers to measure.

    The number is so large that answers at the edges of the window hardly matter.
    """
    return 2 * streams + 20


def steady(document: Document, streams: int) -> MeasuredSpeed:
    """Return the speed of an open loop for the time in which its batch is full.

    The first sessions fill the batch, and the last sessions keep the batch full until the last
    measured session has ended. Neither are measured.

    Args:
        document: The report of the load.
        streams: The number of sessions that fill the batch.

    Raises:
        WrongError: Requests failed.
    """
    _mean(document.summary)
    records = sorted(document.records, key=lambda record: record["start"])
    counted = records[streams : streams + _counted(streams)]
    begun, ended = counted[0]["start"], records[streams + len(counted)]["start"]
    tokens = sum(_tokens_within(record, begun, ended) for record in records)
    offered = sum(record["tokens_out"] for record in counted)
    ttft = statistics.mean(record["first"] - record["start"] for record in counted)
    tpot = statistics.mean((record["chunks"][-1] - record["first"]) / (record["tokens_out"] - 1) for record in counted)
    seconds = ended - begun
    return MeasuredSpeed(ttft, tpot, tokens / seconds, len(counted), offered / seconds)


def _tokens_within(record: dict[str, Any], begun: float, ended: float) -> float:
    """Return the number of tokens that arrived between the times `begun` and `ended`.

    Each of the record's messages counts as the mean number of tokens of a message.
    """
    here = sum(begun <= at < ended for at in record["chunks"])
    return float(here * record["tokens_out"] / len(record["chunks"]))


def _mean(summary: Summary) -> MeasuredSpeed:
    """Return the mean speed of a load. Raise WrongError if requests failed."""
    if summary.failed or summary.ttft is None or summary.tpot is None:
        errors = (
            ", ".join(f"{kind} ({count})" for kind, count in summary.errors.items())
            or "each answer had fewer than two tokens"
        )
        raise WrongError(f"{summary.failed} of {summary.requests} requests failed under load: {errors}")
    rate = summary.output_tokens_per_second
    return MeasuredSpeed(summary.ttft.mean / 1000, summary.tpot.mean / 1000, rate, summary.requests)


async def suspects(engine: EngineContext, streams: int, found: MeasuredSpeed) -> list[str]:
    """Return the likely reasons why an engine is slower than planned.

    The list has only reasons that are visible from this process.
    """
    named = [_batch(engine, streams, found), await _cache(engine), _clocks(found.gpus), _chunked(engine)]
    return [one for one in named if one] or [
        "none of KV cache, clocks, chunked prefill and batch limit explains it; see docs/first-hour.md"
    ]


def _batch(engine: EngineContext, streams: int, found: MeasuredSpeed) -> str | None:
    if engine.metadata.max_batch_size < streams:
        return f"the batch limit is {engine.metadata.max_batch_size}, but the plan has {streams} requests in flight"
    return f"up to {found.waiting:.0f} requests waited outside the batch" if found.waiting >= 1 else None


async def _cache(engine: EngineContext) -> str | None:
    planned = planned_tokens(engine)
    now = await engine.gauges.read() if engine.gauges else {}
    tokens = now.get((BLOCKS, "max"), 0) * now.get((BLOCKS, "tokens_per"), 0)
    if not planned or not tokens or tokens >= ENOUGH * planned:
        return None
    return f"the KV cache holds {tokens:,.0f} tokens of the planned {planned:,.0f} (KV fraction)"


def _clocks(seen: list[HostGpu]) -> str | None:
    slow = [gpu for gpu in seen if gpu.clock < _CLOCK * gpu.max_clock]
    if not slow:
        return None
    lowest = min(slow, key=lambda gpu: gpu.clock)
    return f"{len(slow)} of {len(seen)} GPUs run at {lowest.clock:.0f} of {lowest.max_clock:.0f} MHz (power or heat)"


def _chunked(engine: EngineContext) -> str | None:
    plan = (engine.manifest.plan or {}) if engine.manifest else {}
    if not plan.get("chunked_prefill"):
        return None
    return "chunked prefill is off, but the plan uses it" if _chunks(engine.probe.config.parameters) is False else None


def _chunks(parameters: Mapping[str, Any]) -> bool | None:
    """Return True if the engine model splits prompts into chunks, or None if that is unknown."""
    if "enable_chunked_context" in parameters:
        return str(parameters["enable_chunked_context"].string_value) == "true"
    if "llm_profiles" not in parameters:
        return None
    # Each release line has a profile with the same settings, so the running release need not be
    # known.
    for profile in reversed(json.loads(parameters["llm_profiles"].string_value)):
        if "enable_chunked_prefill" in profile["arguments"]:
            return bool(profile["arguments"]["enable_chunked_prefill"])
    return None
