"""Loads of the benchmark scripts: `llmops bench` in fewer words."""

import asyncio
from typing import Any

from llmops.perf.bench import bench
from llmops.perf.load.runner import run_async
from llmops.perf.options import BenchOptions
from llmops.perf.report.document import Document
from llmops.perf.workloads.lengths import parse_lengths
from tests.support.processes import CpuMeter, difference


def options(url: str, input_: int | str = 64, output: int | str = 64, **given: Any) -> BenchOptions:
    """BenchOptions for `url`; grpc:// asks the engine model."""
    base: dict[str, Any] = {"model": None, "via": "engine" if url.startswith("grpc://") else "chat"}
    lengths = {"input": parse_lengths(str(input_)), "output": parse_lengths(str(output))}
    return BenchOptions(url=url, **{**base, **lengths, **given})


def run(url: str, input_: int | str = 64, output: int | str = 64, **given: Any) -> Document:
    """One load from start to end."""
    return run_async(bench(options(url, input_, output, **given)))


async def window(
    load: BenchOptions, meter: CpuMeter, settle: float, seconds: float
) -> tuple[dict[str, float], int, Document]:
    """Run `load`; CPU used and tokens received in the `seconds` after `settle`, while all streams are open.

    The load must last longer than both together. Returns (CPU per group, tokens, the run).
    """
    task = asyncio.create_task(bench(load))
    await asyncio.sleep(settle)
    before = meter.read()
    await asyncio.sleep(seconds)
    after = meter.read()
    document = await task
    # the records' times are relative to the start of the run, on the same clock
    start, end = (moment["wall"] - document.origin for moment in (before, after))
    tokens = sum(_tokens_between(record, start, end) for record in document.records)
    return difference(before, after), round(tokens), document


def _tokens_between(record: dict[str, Any], start: float, end: float) -> float:
    # a token that is part of a character has no message of its own: the server's count is spread over the messages
    chunks = record["chunks"]
    inside = sum(start <= at < end for at in chunks)
    return inside * record["tokens_out"] / len(chunks) if chunks else 0.0
