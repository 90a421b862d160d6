"""`llmops simulate`: a fleet in simulated time, with the gateway's own policies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.options import ANY_PATH, FILE_PATH, Duration, OutputFile, option_groups, reject_options
from llmops.cli.output import console as terminal_console
from llmops.cli.output import print_line, table_console
from llmops.errors import InputError
from llmops.units import parse_duration

if TYPE_CHECKING:
    from llmops.build.plan.build_plan import BuildPlan
    from llmops.objectives import Objective
    from llmops.perf.report.document import Document
    from llmops.perf.simulate.autoscaler import AutoscalingSpec
    from llmops.perf.simulate.engine import EngineSpec
    from llmops.perf.simulate.fleet import Arrivals, FleetSpec, ReplicaFailure
    from llmops.perf.simulate.run import SimulationResult

POSITIVE = click.FloatRange(0, min_open=True)
NO_QUEUE = "no-queue"
TURNS_A_DAY = 15
PIPED_WIDTH = 120
#: Peak rate of a day as a multiple of its mean (docs/scale.md).
PEAK_TO_MEAN = 2.88
#: Seconds that network, gateway and Triton add to the time of a first token (docs/decisions/0020).
GATEWAY_LATENCY = 0.008
#: Seconds of simulated time after which the replicas are back, when only a herd is simulated.
HERD_START = 1.0
#: Seconds without replicas before a herd that arrives during other load.
OUTAGE_SECONDS = 600.0
#: Tokens of a simulated cache block. Blocks of engines have 32 tokens; fewer and larger blocks take
#: less time to simulate.
CACHE_BLOCK_TOKENS = 128


@option_groups(
    {
        "Fleet": ("plan_path", "replicas", "config", "policies", "scale", "fail", "rollout"),
        "Load": ("rate", "day", "herd", "trace", "bench", "duration", "skip"),
        "Conversations": ("turns", "input_", "output", "think_time", "seed"),
        "Report": ("slo", "json_path", "html_path"),
    }
)
@click.command(name="simulate")
@click.option(
    "--plan",
    "plan_path",
    required=True,
    type=FILE_PATH,
    help="The plan of one replica, written by `llmops plan --save FILE`.",
)
@click.option("--replicas", type=click.IntRange(1), help="Number of replicas.  [default: the plan's]")
@click.option("--config", type=ANY_PATH, help="The gateway's settings; only slo, tiers, waiting and degraded are used.")
@click.option(
    "--policy",
    "policies",
    metavar="POLICY,…",
    default="cheapest",
    help="How replicas are chosen: cheapest is the gateway's own; least-loaded, affinity. "
    f"+{NO_QUEUE} after a name lets requests in at once. Several names are compared on the same requests.",
)
@click.option(
    "--scale", metavar="MIN..MAX", help="Scale the replicas between these numbers by the chart's autoscaling rules."
)
@click.option(
    "--fail",
    multiple=True,
    metavar="N@T[+T]",
    help="Let replica N fail at time T, for +T or else 2m, such as 0@60s+30s. Repeatable.",
)
@click.option("-r", "--rate", type=POSITIVE, help="Mean rate of requests/s, in conversations.")
@click.option(
    "--day",
    type=click.FloatRange(1),
    metavar="USERS",
    help=f"One day of USERS users with {TURNS_A_DAY} turns each; the evening's peak is {PEAK_TO_MEAN} times the mean.",
)
@click.option(
    "--herd",
    metavar="CLIENTS[@TIME]",
    help="Number of clients that arrive within 5 s after an outage, in the tiers of --config, and retry as Retry-After "
    "says. With @TIME, they come in addition to --rate or --day, after ten minutes of outage that end at TIME.",
)
@click.option(
    "--rollout",
    type=Duration(),
    metavar="TIME",
    help="Begin a roll-out to the same number of other replicas at this time.",
)
@click.option("--trace", type=ANY_PATH, help="Replay a JSONL trace (timestamp, input_length, …).")
@click.option("--bench", type=ANY_PATH, help="Replay the requests of a `llmops bench --json` file.")
@click.option(
    "-d", "--duration", type=Duration(), help="Time during which requests arrive.  [default: 10m; with --day 24h]"
)
@click.option(
    "--skip", type=Duration(zero=True), default="0s", help="Time at the beginning to leave out of the report."
)
@click.option("--turns", default="5", help="Turns per conversation, a distribution.")
@click.option(
    "-i", "--input", "input_", default="lognormal:250,0.6", help="Length of a message in tokens, a distribution."
)
@click.option("-o", "--output", default="lognormal:334,0.6", help="Length of an answer in tokens, a distribution.")
@click.option("--think-time", type=Duration(zero=True), default="30s", help="Pause between turns.")
@click.option("--seed", type=int, default=0, help="Seed of all random choices.")
@click.option(
    "--slo",
    multiple=True,
    help="Objective: ttft:500ms for each request, tpot_p99:40ms, or availability:99.9%. Repeatable.  [default: the "
    "objectives of --config]",
)
@click.option("--json", "json_path", type=OutputFile(), help="Write the whole run to this file.")
@click.option("--html", "html_path", type=OutputFile(), help="Write a page to this file.")
def command(json_path: Path | None, html_path: Path | None, policies: str, **parameters: Any) -> None:
    """Simulate a fleet behind the gateway's own routing, queue and limits.

    Replicas generate at the planner's pace.

    The load is made-up conversations (--rate, --day), clients that waited for the end of an outage
    (--herd), a trace in Mooncake's format (--trace) or what a benchmark sent (--bench). The report
    has the form of `llmops bench`, whose --compare reads the files of both commands. Lengths are
    distributions; see `llmops bench --help`.
    """
    parameters["herd"], parameters["herd_at"] = _parse_herd(parameters["herd"])
    alone = "herd" if parameters["herd_at"] is None else "rate"
    if sum(parameters[name] is not None for name in {"rate", "day", alone, "trace", "bench"}) != 1:
        raise click.UsageError(
            "The load is missing or given twice; choose one of --rate, --day, --herd, --trace and --bench."
        )
    if parameters["trace"] or parameters["bench"]:
        reject_options("A replay has its own times and lengths", "duration", "turns", "input_", "output", "think_time")
    elif alone == "herd" and parameters["herd"] is not None:
        reject_options("Clients of --herd alone send one request each", "duration", "turns", "think_time")
    from llmops.perf.simulate.report import show, show_comparison

    console = table_console(PIPED_WIDTH)
    documents = [
        (name, _document({**parameters, "policy": policy, "gate": gate}, name, terminal_console(stderr=True)))
        for name, (policy, gate) in _policies(policies).items()
    ]
    if len(documents) > 1:
        show_comparison(documents, console)
    else:
        show(documents[0][1], console)
    _write(documents, json_path, html_path)


def _policies(text: str) -> dict[str, tuple[str, bool]]:
    """Return the policies by their names on the command line.

    The second element of each value is True if requests queue in the gateway.
    """
    from llmops.perf.simulate.policies import POLICIES

    found = {}
    for name in filter(None, map(str.strip, text.split(","))):
        policy, _, rest = name.partition("+")
        if policy not in POLICIES:
            raise InputError(f"--policy {name} is not a policy; choose from {', '.join(POLICIES)}.")
        if rest not in ("", NO_QUEUE):
            raise InputError(f"--policy {name}: only {NO_QUEUE} can follow the +; write {policy}+{NO_QUEUE}.")
        found[name] = (policy, not rest)
    if not found:
        raise InputError(f"--policy names no policy; choose from {', '.join(POLICIES)}.")
    return found


def _document(parameters: dict[str, Any], name: str, console: Any) -> Document:
    from llmops.build.plan.build_plan import BuildPlan
    from llmops.perf.load.objectives import parse_objective
    from llmops.perf.simulate.engine import make_engine_spec
    from llmops.perf.simulate.report import document_of
    from llmops.perf.simulate.totals import spec_of
    from llmops.perf.workloads.files import BLOCK_TOKENS

    plan = BuildPlan.load(parameters["plan_path"])
    parameters["replicas"] = _most(parameters["scale"]) or parameters["replicas"] or plan.replicas
    engine = make_engine_spec(plan, BLOCK_TOKENS if parameters["trace"] else CACHE_BLOCK_TOKENS)
    rules, slos = _rules(parameters["config"], plan.model)
    if not parameters["gate"]:
        rules["tiers"] = ()
    slos = [parse_objective(text) for text in parameters["slo"]] or slos
    spec = replace(_spec(parameters, plan, engine), **rules)
    simulating = f"simulating {name} …"
    with console.status(simulating) as status:

        def tell(seconds: float, requests: int) -> None:
            status.update(f"{simulating} {seconds:,.0f} s, {requests:,} requests")

        done = _simulated(parameters, spec, tell)
    if done.simulated and not done.run.records:
        raise InputError(f"--skip {parameters['skip']:g}: all requests came before that; leave out fewer seconds.")
    load = ("rate", "day", "herd", "duration", "turns", "input_", "output", "think_time", "skip")
    options = {one: parameters[one] for one in (*load, *(("scale",) if parameters["scale"] else ()))}
    options["slos"] = [str(slo) for slo in slos]
    options["events"] = _events(parameters, spec, done)
    options |= {"model": plan.model, "trace": str(parameters["trace"] or parameters["bench"] or "") or None}
    return document_of(done, slos, options, spec_of(spec))


def _events(parameters: dict[str, Any], spec: FleetSpec, done: SimulationResult) -> list[tuple[float, str]]:
    """Return the times of the fleet's events, for the plots."""
    found = [(one.at, "lost") for one in spec.failures]
    if parameters["herd_at"] is not None:
        at = parameters["herd_at"]
        found += [(max(at - OUTAGE_SECONDS, 0.0), "outage"), (at, "herd")]
    found += [(at, f"{percent:g} %") for at, percent in done.tally.rollout]
    # times in a document count from the first request
    return sorted({(round(at - done.run.start, 3), label) for at, label in found})


def _parse_herd(text: str | None) -> tuple[int | None, float | None]:
    """Return the number of clients of --herd, and the time in seconds.

    The time is None if --herd gives only the clients. Both are None without --herd.
    """
    if text is None:
        return None, None
    clients, at, when = text.partition("@")
    try:
        found = int(clients), parse_duration(when) if at else None
    except ValueError:
        found = 0, None
    if found[0] < 1:
        raise InputError(f"--herd {text}: write a number of clients, or CLIENTS@TIME such as 5000@10h.")
    return found


def _spec(parameters: dict[str, Any], plan: BuildPlan, engine: EngineSpec) -> FleetSpec:
    from llmops.perf.simulate.fleet import FleetSpec

    return FleetSpec(
        engine,
        parameters["replicas"],
        parameters["policy"],
        failures=[_failure(text, parameters["replicas"]) for text in parameters["fail"]],
        seed=parameters["seed"],
        scaling=_scaling(parameters, plan) if parameters["scale"] else None,
        outage=_outage(parameters),
        rollout=parameters["rollout"],
    )


def _outage(parameters: dict[str, Any]) -> tuple[float, float] | None:
    """Return the start and end in seconds of the outage before a herd, or None without --herd."""
    if parameters["herd"] is None:
        return None
    at = parameters["herd_at"]
    return (0.0, HERD_START) if at is None else (max(at - OUTAGE_SECONDS, 0.0), at)


def _most(scale: str | None) -> int:
    """Return the maximum number of replicas of --scale.

    The number is 0 without --scale, or if its text is invalid.
    """
    last = (scale or "").rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def _scaling(parameters: dict[str, Any], plan: BuildPlan) -> AutoscalingSpec:
    """Return the autoscaling rules of the Helm chart.

    The rules scale by waiting requests, KV-cache use and the plan's request rate of a replica.
    """
    from llmops.perf.simulate.autoscaler import AutoscalingSpec
    from llmops.perf.simulate.run import CELL_SIZE

    match = re.fullmatch(r"(\d+)\.\.(\d+)", parameters["scale"])
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= CELL_SIZE:
        raise InputError(f"--scale {parameters['scale']}: write MIN..MAX, such as 1..8, with at most {CELL_SIZE}.")
    for name in ("fail", "rollout"):
        if parameters[name]:
            raise InputError(f"--scale decides the number of replicas; leave out --{name}.")
    rate = plan.predicted.get("best", {}).get("rate")
    targets = {**AutoscalingSpec().targets, **({"requests": rate} if rate else {})}
    return AutoscalingSpec(int(match[1]), int(match[2]), targets)


def _simulated(
    parameters: dict[str, Any], spec: FleetSpec, on_progress: Callable[[float, int], None]
) -> SimulationResult:
    from llmops.perf.report.document import read_document
    from llmops.perf.simulate.arrivals import arrivals_from_bench, arrivals_from_trace
    from llmops.perf.simulate.run import HERD_CELL_SIZE, cell_sizes, make_cells, simulate

    def arrivals(begin: float, end: float, number: int) -> Arrivals:
        if parameters["trace"]:
            return arrivals_from_trace(parameters["trace"])
        if parameters["bench"]:
            return arrivals_from_bench(read_document(parameters["bench"]))
        herd = _herd(parameters, spec, begin, end, number) if parameters["herd"] else None
        if herd is not None and parameters["herd_at"] is None:
            return herd
        conversations = _conversations(parameters, end - begin, number)
        return conversations if herd is None else conversations.joined(herd)

    if parameters["herd"] and parameters["herd_at"] is None:
        sizes = cell_sizes(spec.replicas, HERD_CELL_SIZE)
    else:
        # a replay is sent to all replicas as one cell
        sizes = [spec.replicas] if parameters["trace"] or parameters["bench"] else cell_sizes(spec.replicas)
    return simulate(make_cells(spec, sizes, arrivals, parameters["skip"], GATEWAY_LATENCY), on_progress)


def _herd(parameters: dict[str, Any], spec: FleetSpec, begin: float, end: float, number: int) -> Arrivals:
    from llmops.perf.simulate.herd import HerdArrivals
    from llmops.perf.workloads.lengths import parse_lengths

    return HerdArrivals(
        # divide the clients among the cells
        round(parameters["herd"] * end) - round(parameters["herd"] * begin),
        [(tier.name, 1.0) for tier in spec.tiers] or [("", 1.0)],
        message=parse_lengths(parameters["input_"]),
        answer=parse_lengths(parameters["output"]),
        start=HERD_START if parameters["herd_at"] is None else parameters["herd_at"],
        seed=parameters["seed"] * 1009 + number,
    ).arrivals()


def _conversations(parameters: dict[str, Any], share: float, number: int) -> Arrivals:
    from llmops.perf.simulate.arrivals import DAY, ConversationArrivals
    from llmops.perf.workloads.lengths import parse_lengths

    rate = parameters["rate"] or parameters["day"] * TURNS_A_DAY / DAY
    return ConversationArrivals(
        rate * share,
        parameters["duration"] or (DAY if parameters["day"] else 600.0),
        turns=parse_lengths(parameters["turns"]),
        message=parse_lengths(parameters["input_"]),
        answer=parse_lengths(parameters["output"]),
        think=parameters["think_time"],
        peak=PEAK_TO_MEAN if parameters["day"] else 1.0,
        block_tokens=CACHE_BLOCK_TOKENS,
        seed=parameters["seed"] * 1009 + number,
    ).arrivals()


def _rules(config: Path | None, model: str) -> tuple[dict[str, Any], list[Objective]]:
    """Return fields of a FleetSpec from the gateway's settings, and the objectives."""
    from llmops.gateway.routing.admission.degradation import rules_from_settings
    from llmops.gateway.routing.admission.request_queue import admission_limits_from_settings, tiers_from_settings
    from llmops.gateway.settings import load_settings

    settings = load_settings(config)
    rules = {
        "tiers": tiers_from_settings(settings, model),
        "bounds": admission_limits_from_settings(settings, model),
        "degraded": rules_from_settings(settings),
    }
    return rules, settings.slo_of(model).listed()


def _failure(text: str, replicas: int) -> ReplicaFailure:
    """Parse a --fail option. `replicas` is the number of simulated replicas."""
    from llmops.perf.simulate.fleet import ReplicaFailure

    number, _, when = text.partition("@")
    at, _, lasts = when.partition("+")
    try:
        found = ReplicaFailure(int(number), parse_duration(at), parse_duration(lasts or "2m"))
    except ValueError as error:
        raise InputError(f"--fail {text}: {error}; write N@TIME or N@TIME+TIME, such as 0@60s+30s.") from error
    if not 0 <= found.replica < replicas:
        raise InputError(f"--fail {text}: replicas are numbered from 0 to {replicas - 1}.")
    return found


def _write(documents: list[tuple[str, Document]], json_path: Path | None, html_path: Path | None) -> None:
    """Write each document. With several documents, their names become part of the file names."""
    from llmops.perf.report.html_page import write_page

    for way, document in documents:
        for path, write in ((json_path, document.write), (html_path, lambda to, one=document: write_page(one, to))):
            if path is not None:
                to = path if len(documents) == 1 else path.with_name(f"{path.stem}-{way}{path.suffix}")
                write(to)
                print_line(f"Wrote {to}")
