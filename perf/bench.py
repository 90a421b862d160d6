"""`llmops bench` without the command line: options in, a report document out."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmops.errors import InputError, LlmopsError, ServerError
from llmops.perf.clients.base import Client
from llmops.perf.load.arrivals import arrival_times
from llmops.perf.load.runner import Limit, Run, Runner
from llmops.perf.load.slo import Slo, is_good
from llmops.perf.load.sweep import Step, highest_rate
from llmops.perf.records import Record
from llmops.perf.report.document import Document, machine
from llmops.perf.report.statistics import summarise
from llmops.perf.workloads.base import Workload
from llmops.perf.workloads.files import PromptFile, Trace, TraceEntry, read_trace
from llmops.perf.workloads.filler import Filler, Text, TokenIds
from llmops.perf.workloads.lengths import Lengths
from llmops.perf.workloads.synthetic import Form, Shape, Synthetic

STEP_SECONDS = 30.0  # of a sweep step, unless --duration says otherwise
UNLOADED = 8  # requests sent one at a time before a sweep


@dataclass
class BenchOptions:
    """What `llmops bench` was asked to do. Lengths in tokens, times in seconds, rates per second."""

    url: str
    model: str | None
    via: str
    input: Lengths
    output: Lengths
    requests: int | None = None
    duration: float | None = None
    concurrency: int | None = None
    rate: float | None = None
    arrival: str = "poisson"
    burstiness: float = 0.25
    max_concurrency: int | None = None
    warmup: int | None = None
    think_time: float = 0.0
    turns: Lengths | None = None
    prefix_tokens: int = 0
    prefix_groups: int = 1
    tools: int = 0
    cancel_share: float = 0.0
    prompts: Path | None = None
    trace: Path | None = None
    trace_speed: float = 1.0
    slos: list[Slo] = field(default_factory=list)
    slo_share: float = 0.99
    sweep: bool = False
    sweep_max: float = 1024.0
    seed: int = 0
    stream: bool = True
    ignore_eos: bool = True
    usage: bool = True
    timeout: float = 600.0
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    verify: bool = True

    def check(self) -> None:
        """Raises InputError for what cannot be meant together."""
        if self.rate is not None and self.concurrency is not None:
            raise InputError("--rate (open loop) and --concurrency (closed loop) exclude each other; give one.")
        if self.trace is not None and (self.rate or self.concurrency or self.prompts or self.turns):
            raise InputError("--trace brings its own times and lengths: no --rate, --concurrency, --prompts, --turns.")
        if self.sweep and not self.slos:
            raise InputError("--sweep looks for the highest rate that holds the objectives: give at least one --slo.")
        if self.sweep and (self.trace or self.concurrency):
            raise InputError("--sweep sets the rate itself: leave out --trace and --concurrency.")
        if self.via in ("engine", "ensemble") and (self.tools or self.prompts):
            raise InputError("--tools and --prompts need an OpenAI endpoint.")
        if (self.via in ("engine", "ensemble")) != self.url.startswith("grpc://"):
            raise InputError(
                f"--via {self.via} does not fit {self.url}: grpc:// for engine and ensemble, else http://."
            )
        if self.max_concurrency and self.rate is None and not self.sweep and self.trace is None:
            raise InputError("--max-concurrency bounds an open loop: give --rate, --sweep or --trace with it.")
        if self.cancel_share and not self.stream:
            raise InputError("--cancel leaves in the middle of a stream: not with --no-stream.")
        made_up = [name for name in ("turns", "tools", "prefix_tokens", "cancel_share") if getattr(self, name)]
        if made_up and (self.trace or self.prompts):
            names = ", ".join("--" + name.removesuffix("_share").replace("_", "-") for name in made_up)
            raise InputError(f"{names} shape made-up prompts: not with --trace or --prompts.")
        if self.via == "ensemble" and self.turns:
            raise InputError("--turns needs a chat endpoint or --via engine.")

    def public(self) -> dict[str, Any]:
        """For the report: everything but secrets."""
        hidden = {"api_key", "headers"}
        data = {key: value for key, value in asdict(self).items() if key not in hidden}
        for name in ("input", "output", "turns"):
            data[name] = getattr(self, name).text if getattr(self, name) else None
        data["prompts"], data["trace"] = (str(path) if path else None for path in (self.prompts, self.trace))
        data["slos"] = [f"{slo.metric}:{1000 * slo.seconds:g}" for slo in self.slos]
        return data


class Progress:
    """What the command line shows meanwhile; this one shows nothing."""

    def phase(self, name: str, sessions: int | None, seconds: float | None) -> None: ...

    def record(self, record: Record) -> None: ...

    def step(self, step: Step) -> None: ...


async def bench(options: BenchOptions, progress: Progress | None = None) -> Document:
    """Run what `options` ask for. Raises InputError, ServerError."""
    options.check()
    progress = progress or Progress()
    client, model, form, filler = await _connect(options)
    entries = read_trace(options.trace, options.trace_speed) if options.trace else None
    try:
        workload = _workload(options, form, filler, entries)
        runner = Runner(client, workload, progress.record, options.think_time)
        await _warm_up(options, runner, progress)
        steps: list[Step] = []
        run = await _measure(options, runner, entries, progress, steps)
    finally:
        await client.close()
    return _document(options, model, run, steps)


async def _connect(options: BenchOptions) -> tuple[Client, str, Form, Filler]:
    if options.via in ("chat", "completions"):
        return await _openai(options)
    return await _triton(options)


async def _openai(options: BenchOptions) -> tuple[Client, str, Form, Filler]:
    from llmops.perf.clients.openai import OpenAIClient, OpenAITarget, first_model

    auth = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    model = options.model or await first_model(options.url, {**options.headers, **auth}, options.verify)
    chat = options.via == "chat"
    shared = ("stream", "ignore_eos", "usage", "timeout", "api_key", "extra", "headers", "verify")
    target = OpenAITarget(options.url, model, chat, **{name: getattr(options, name) for name in shared})
    return OpenAIClient(target), model, "chat" if chat else "prompt", Text()


async def _triton(options: BenchOptions) -> tuple[Client, str, Form, Filler]:
    from llmops.perf.clients.triton import TritonClient, TritonTarget, first_model

    address = options.url.removeprefix("grpc://")
    model = options.model or await first_model(address)
    ensemble = options.via == "ensemble"
    client = TritonClient(TritonTarget(address, model, ensemble, options.stream, options.ignore_eos, options.timeout))
    if ensemble:
        return client, model, "prompt", Text()
    try:
        card = await client.card()
    except ServerError:
        await client.close()
        raise
    return client, model, "prompt", TokenIds(min(int(card.get("vocab_size", 1000)), 10_000))


def _workload(options: BenchOptions, form: Form, filler: Filler, entries: list[TraceEntry] | None) -> Workload:
    if entries is not None:
        return Trace(entries, filler, form, options.seed)
    if options.prompts is not None:
        return PromptFile(options.prompts, options.output, form, options.seed)
    names = ("input", "output", "turns", "prefix_tokens", "prefix_groups", "tools", "cancel_share", "seed")
    return Synthetic(Shape(**{name: getattr(options, name) for name in names}, form=form), filler)


async def _warm_up(options: BenchOptions, runner: Runner, progress: Progress) -> None:
    concurrency = options.concurrency or 4
    sessions = concurrency if options.warmup is None else options.warmup
    if not sessions:
        return
    progress.phase("warm-up", sessions, None)
    run = await runner.closed(min(concurrency, sessions), Limit(sessions))
    errors = sorted({record.error for record in run.records if record.error is not None})
    if run.records and all(record.error for record in run.records):
        raise ServerError(f"All {len(run.records)} warm-up requests to {options.url} failed: {', '.join(errors)}.")


async def _measure(
    options: BenchOptions, runner: Runner, entries: list[TraceEntry] | None, progress: Progress, steps: list[Step]
) -> Run:
    limit = Limit(options.requests, options.duration)
    if entries is not None:
        limit = Limit(min(options.requests or len(entries), len(entries)), options.duration)
        progress.phase("trace", limit.sessions, limit.seconds)
        return await runner.open([entry.at for entry in entries], limit, options.max_concurrency)
    if options.sweep:
        limit = Limit(options.requests, options.duration or STEP_SECONDS)
        return await _sweep(options, runner, limit, progress, steps)
    progress.phase("load", limit.sessions, limit.seconds)
    if options.rate is not None:
        return await _open(options, runner, options.rate, limit)
    return await runner.closed(options.concurrency or 1, limit)


async def _open(options: BenchOptions, runner: Runner, rate: float, limit: Limit) -> Run:
    arrivals = arrival_times(options.arrival, rate, random.Random(options.seed), options.burstiness)
    return await runner.open(arrivals, limit, options.max_concurrency)


async def _check_unloaded(options: BenchOptions, runner: Runner, progress: Progress) -> None:
    """A server that breaks the objectives with one request at a time would be tried at ever lower rates."""
    progress.phase("one at a time", UNLOADED, None)
    run = await runner.closed(1, Limit(UNLOADED, STEP_SECONDS))
    records = run.stayed
    good = sum(is_good(record, options.slos) for record in records)
    if good < len(records) / 2:
        raise LlmopsError(
            f"Only {good} of {len(records)} requests held the objectives when sent one at a time, so no rate will: "
            "relax --slo or speed up the server."
        )


async def _sweep(options: BenchOptions, runner: Runner, limit: Limit, progress: Progress, steps: list[Step]) -> Run:
    runs: dict[float, Run] = {}

    async def measure(rate: float) -> Step:
        progress.phase(f"{rate:g} req/s", limit.sessions, limit.seconds)
        runs[rate] = await _open(options, runner, rate, limit)
        step = Step.of(rate, runs[rate], options.slos, options.slo_share)
        steps.append(step)
        progress.step(step)
        return step

    await _check_unloaded(options, runner, progress)
    best = await highest_rate(measure, options.rate or 1.0, options.sweep_max)
    return runs[best.rate if best else min(runs)]


def _document(options: BenchOptions, model: str, run: Run, steps: list[Step]) -> Document:
    return Document(
        options=options.public() | {"model": model},
        machine=machine(),
        summary=summarise(run, options.slos),
        sweep=steps,
        origin=run.start,
        records=[record.to_json(run.start) for record in sorted(run.records, key=lambda record: record.start)],
    )
