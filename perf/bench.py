"""The benchmark behind `llmops bench`, without the command line: from options to a report document."""

import random

from llmops.connection_errors import check_url
from llmops.errors import LlmopsError, ServerError
from llmops.perf.clients.base import Client
from llmops.perf.load.objectives import meets_objectives
from llmops.perf.load.runner import LoadRun, Runner, StopCondition, arrival_times
from llmops.perf.load.sweep import SweepStep, highest_rate
from llmops.perf.options import BenchOptions, BenchProgress
from llmops.perf.report.document import Document, machine
from llmops.perf.report.summary import summarise
from llmops.perf.workloads.base import Workload
from llmops.perf.workloads.files import PromptFile, TraceEntry, TraceWorkload, read_trace
from llmops.perf.workloads.filler import Filler, TokenIdFiller, WordFiller
from llmops.perf.workloads.synthetic import PromptForm, SyntheticSpec, SyntheticWorkload
from llmops.urls import without_secrets

#: Seconds of each rate of a sweep if --duration is not set: 120 requests at 4 requests/s.
STEP_SECONDS = 30.0
#: Number of requests sent one at a time before a sweep, to check that the objectives can be met.
#: Few requests suffice, because the check only counts whether half of them meet the objectives.
UNLOADED = 8
#: Rate in requests/s at which a sweep ends, because one load generator process cannot send more.
HIGHEST_RATE = 1024.0


async def bench(options: BenchOptions, progress: BenchProgress | None = None) -> Document:
    """Run a benchmark and return its document.

    Raises:
        InputError: The options or the input files are invalid.
        ServerError: The server cannot be reached, or fails all warm-up requests.
    """
    options.check()
    progress = progress or BenchProgress()
    client, model, form, filler = await _connect(options)
    entries = read_trace(options.trace) if options.trace else None
    try:
        workload = _workload(options, form, filler, entries)
        runner = Runner(client, workload, progress.record, options.think_time)
        await _warm_up(options, runner, progress)
        steps: list[SweepStep] = []
        run = await _measure(options, runner, entries, progress, steps)
    finally:
        await client.close()
    return _document(options, model, run, steps)


async def _connect(options: BenchOptions) -> tuple[Client, str, PromptForm, Filler]:
    if options.via in ("chat", "completions"):
        return await _openai(options)
    return await _triton(options)


async def _openai(options: BenchOptions) -> tuple[Client, str, PromptForm, Filler]:
    from llmops.perf.clients.openai import OpenAIBenchClient, first_model

    check_url(options.url, "URL")
    auth = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    model = options.model or await first_model(options.url, {**options.headers, **auth})
    chat = options.via == "chat"
    client = OpenAIBenchClient(options.url, model, chat, options)
    return client, model, "chat" if chat else "prompt", WordFiller()


async def _triton(options: BenchOptions) -> tuple[Client, str, PromptForm, Filler]:
    from llmops.perf.clients.triton import TritonBenchClient, first_model

    address = options.url.removeprefix("grpc://")
    model = options.model or await first_model(address)
    ensemble = options.via == "ensemble"
    client = TritonBenchClient(address, model, options, ensemble)
    if ensemble:
        return client, model, "prompt", WordFiller()
    try:
        metadata = await client.read_metadata()
    except ServerError:
        await client.close()
        raise
    size = metadata.get("vocab_size")
    return client, model, "prompt", TokenIdFiller(min(size, 10_000) if isinstance(size, int) and size > 0 else 1000)


def _workload(options: BenchOptions, form: PromptForm, filler: Filler, entries: list[TraceEntry] | None) -> Workload:
    if entries is not None:
        return TraceWorkload(entries, filler, form, options.seed)
    if options.prompts is not None:
        return PromptFile(options.prompts, options.output, form, options.seed)
    names = ("input", "output", "turns", "prefix_tokens", "tools", "cancel_share", "seed")
    return SyntheticWorkload(SyntheticSpec(**{name: getattr(options, name) for name in names}, form=form), filler)


async def _warm_up(options: BenchOptions, runner: Runner, progress: BenchProgress) -> None:
    concurrency = options.concurrency or 4
    sessions = concurrency if options.warmup is None else options.warmup
    if not sessions:
        return
    progress.phase("warm-up", sessions, None)
    run = await runner.closed(min(concurrency, sessions), StopCondition(sessions))
    errors = sorted({record.error for record in run.records if record.error is not None})
    if run.records and all(record.error for record in run.records):
        raise ServerError(
            f"All {len(run.records)} warm-up requests to {without_secrets(options.url)} failed: {', '.join(errors)}; "
            "correct the model, key or request named there, or see the server's log."
        )


async def _measure(
    options: BenchOptions,
    runner: Runner,
    entries: list[TraceEntry] | None,
    progress: BenchProgress,
    steps: list[SweepStep],
) -> LoadRun:
    limit = StopCondition(options.requests, options.duration)
    if entries is not None:
        limit = StopCondition(min(options.requests or len(entries), len(entries)), options.duration)
        progress.phase("trace", limit.sessions, limit.seconds)
        return await runner.open([entry.at for entry in entries], limit, options.concurrency)
    if options.sweep:
        limit = StopCondition(options.requests, options.duration or STEP_SECONDS)
        return await _sweep(options, runner, limit, progress, steps)
    progress.phase("load", limit.sessions, limit.seconds)
    if options.rate is not None:
        return await _open(options, runner, options.rate, limit)
    return await runner.closed(options.concurrency or 4, limit)


async def _open(options: BenchOptions, runner: Runner, rate: float, limit: StopCondition) -> LoadRun:
    arrivals = arrival_times(options.arrival, rate, random.Random(options.seed))
    return await runner.open(arrivals, limit, options.concurrency)


async def _check_unloaded(options: BenchOptions, runner: Runner, progress: BenchProgress) -> None:
    """Check that the server meets the objectives without load, by requests sent one at a time.

    Raise LlmopsError if most requests miss the objectives, because then no rate can meet them.
    """
    progress.phase("one at a time", UNLOADED, None)
    run = await runner.closed(1, StopCondition(UNLOADED, STEP_SECONDS))
    records = run.stayed
    good = sum(meets_objectives(record, options.slos) for record in records)
    if good < len(records) / 2:
        raise LlmopsError(
            f"Only {good} of {len(records)} requests met the objectives when sent one at a time, so no rate can: "
            "relax --slo or speed up the server."
        )


async def _sweep(
    options: BenchOptions, runner: Runner, limit: StopCondition, progress: BenchProgress, steps: list[SweepStep]
) -> LoadRun:
    runs: dict[float, LoadRun] = {}

    async def measure(rate: float) -> SweepStep:
        progress.phase(f"{rate:g} req/s", limit.sessions, limit.seconds)
        runs[rate] = await _open(options, runner, rate, limit)
        step = SweepStep.of(rate, runs[rate], options.slos, options.slo_share)
        steps.append(step)
        progress.step(step)
        return step

    await _check_unloaded(options, runner, progress)
    best = await highest_rate(measure, options.rate or 1.0, HIGHEST_RATE)
    return runs[best.rate if best else min(runs)]


def _document(options: BenchOptions, model: str, run: LoadRun, steps: list[SweepStep]) -> Document:
    return Document(
        options=options.public() | {"model": model},
        machine=machine(),
        summary=summarise(run, options.slos),
        sweep=steps,
        origin=run.start,
        records=[record.to_json(run.start) for record in sorted(run.records, key=lambda record: record.start)],
    )
