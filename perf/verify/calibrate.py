"""Measurement of an engine's step times on this host, for `llmops plan --measured`.

Decode steps are measured by batch size, and prefills by prompt length.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.plan.speed.measured_steps import MeasuredSteps, StepTime
from llmops.errors import LlmopsError
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.host import device_name
from llmops.perf.verify.probe import ProbeResponse

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (64, 1024)
_PROMPTS = (64, 256, 1024, 4096)
#: Number of decode steps of a measured point: enough for a stable mean.
_STEPS = 24
_PATIENCE = 30.0


async def calibrate(engine: EngineContext, manifest: EngineManifest, on_point: Callable[[str], None]) -> MeasuredSteps:
    """Return the step times at all points, measured from the smallest to the largest.

    Points that would take more than half a minute are skipped.
    """
    steps = [*await _prefills(engine, on_point), *await _decodes(engine, manifest, on_point)]
    plan = manifest.plan or {}
    parallel = manifest.parallelism
    return MeasuredSteps(
        device=device_name(manifest.target),
        gpu=plan.get("gpu"),
        model=manifest.name,
        architecture=manifest.architecture,
        target=manifest.target,
        quantisation=manifest.quantisation.weights,
        kv_cache_dtype=manifest.quantisation.kv_cache,
        layout=parallel,
        versions=manifest.versions,
        steps=steps,
    )


async def _prefills(engine: EngineContext, on_point: Callable[[str], None]) -> list[StepTime]:
    """Measure prefills with new prompts, so that no prefix is cached.

    The time to the first token is one step that reads the prompt.
    """
    found = []
    for tokens in _PROMPTS:
        if tokens + 2 > engine.metadata.max_seq_len:
            break
        on_point(f"prefill of {tokens} tokens")
        times = [await _first_token(engine, tokens) for _ in range(4)][1:]
        seconds = statistics.median(times)
        found.append(StepTime(phase="prefill", batch_size=1, tokens=tokens, context=0, seconds=seconds, samples=3))
        if seconds * 16 > _PATIENCE:
            break
    return found


async def _first_token(engine: EngineContext, tokens: int) -> float:
    begun = time.perf_counter()
    _checked(await engine.probe.ask(_fresh(engine, tokens), 1))
    return time.perf_counter() - begun


async def _decodes(engine: EngineContext, manifest: EngineManifest, on_point: Callable[[str], None]) -> list[StepTime]:
    found: list[StepTime] = []
    for context in _CONTEXTS:
        for batch in _BATCHES:
            if batch > engine.metadata.max_batch_size or context + _STEPS + 2 > engine.metadata.max_seq_len:
                break
            on_point(f"decode of {batch} sequences after {context} tokens")
            begun = time.monotonic()
            # Prompts join the batch over as many steps as their tokens need.
            joining = -(-batch * context // manifest.limits.max_num_tokens) + 8
            step = await _decode(engine, batch, context, _STEPS + 2 * joining)
            if step is not None:
                found.append(step)
            if 2 * (time.monotonic() - begun) > _PATIENCE:
                break
    return found


async def _decode(engine: EngineContext, batch: int, context: int, new: int) -> StepTime | None:
    """Return the duration of a decode step with a full batch, or None if too few were measured.

    Each of `batch` sequences generates at most `new` tokens after a prompt of `context` tokens.
    """
    arrivals: list[list[float]] = [[] for _ in range(batch)]

    def watch(number: int) -> Callable[[ProbeResponse], bool]:
        def saw(result: ProbeResponse) -> bool:
            if result.sizes and not result.finals:
                arrivals[number].append(time.perf_counter())
            return False

        return saw

    new = min(new, engine.metadata.max_seq_len - context - 1)
    requests = (engine.probe.ask(_fresh(engine, context), new, watch(number)) for number in range(batch))
    for result in await asyncio.gather(*requests):
        _checked(result)
    if min(map(len, arrivals)) < 2:
        return None
    begun, ended = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    gaps = [b - a for times in arrivals for a, b in itertools.pairwise(times) if a >= begun and b <= ended]
    if len(gaps) < 3:
        return None
    middle = context + new // 2
    seconds = statistics.mean(gaps)
    return StepTime(
        phase="decode", batch_size=batch, tokens=batch, context=middle, seconds=seconds, samples=len(gaps)
    )  # fmt: skip


def _checked(result: ProbeResponse) -> None:
    if result.error is not None:
        raise LlmopsError(f"The calibration failed: {result.error}; see Triton's log.")


def _fresh(engine: EngineContext, tokens: int) -> list[int]:
    highest = min(engine.metadata.vocab_size, 10_000) - 1
    return [random.randint(min(10, highest), highest) for _ in range(tokens)]
