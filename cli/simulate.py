"""`llmops simulate`: a fleet in simulated time, with the gateway's own policies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.console import console as terminal_console
from llmops.cli.console import table_console
from llmops.cli.options import Duration, OutputFile, help_all_option, rare_option
from llmops.durations import seconds
from llmops.errors import InputError

if TYPE_CHECKING:
    from llmops.gateway.fleet.admission.gate import Bounds
    from llmops.gateway.fleet.admission.order import Tier
    from llmops.perf.report.document import Document
    from llmops.perf.simulate.fleet import Arrivals, Failure, FleetSpec
    from llmops.perf.simulate.run import Simulated
    from llmops.perf.simulate.scaling import Scaling

POSITIVE = click.FloatRange(0, min_open=True)
NO_GATE = "no-gate"
TURNS_A_DAY = 15
PIPED = 120
# the part of a first token's time that is not the engine's (docs/decisions/0020)
ADDED = "8ms"


@click.command(name="simulate")
@click.option(
    "--plan",
    "plan_path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The plan of one replica, written by `llmops plan --save FILE`.",
)
@click.option("--replicas", type=click.IntRange(1), help="Number of replicas.  [default: the plan's]")
@click.option("-r", "--rate", type=POSITIVE, help="Requests/s, in conversations.")
@click.option(
    "--day",
    type=click.FloatRange(1),
    metavar="USERS",
    help=f"Simulate one day of USERS users with {TURNS_A_DAY} turns each.",
)
@rare_option(
    "--peak",
    type=click.FloatRange(1, 3.2),
    default=2.88,
    show_default=True,
    help="With --day: peak rate of the day as a multiple of its mean.",
)
@rare_option(
    "--start",
    type=click.FloatRange(0, 24),
    default=0.0,
    help="With --day: hour of the day at which the simulation begins.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="Replay a JSONL trace (timestamp, input_length, …).")
@click.option("--bench", type=click.Path(path_type=Path), help="Replay the requests of a `llmops bench --json` file.")
@rare_option("--speed", type=POSITIVE, default=1.0, show_default=True, help="Replay this many times as fast.")
@click.option("-d", "--duration", type=Duration(), help="How long requests arrive.  [default: 10m; with --day 24h]")
@rare_option(
    "--skip", type=Duration(zero=True), default="0s", help="Leave the beginning out of the report, such as 240s."
)
@click.option("--turns", default="5", show_default=True, help="Turns per conversation, a distribution.")
@rare_option(
    "--system", type=click.IntRange(1), default=1300, show_default=True, help="Length of a system prompt in tokens."
)
@rare_option(
    "--apps", type=click.IntRange(1), default=50, show_default=True, help="Number of different system prompts."
)
@click.option(
    "-i",
    "--input",
    "input_",
    default="lognormal:250,0.6",
    show_default=True,
    help="Length of a message in tokens, a distribution.",
)
@click.option(
    "-o",
    "--output",
    default="lognormal:334,0.6",
    show_default=True,
    help="Length of an answer in tokens, a distribution.",
)
@click.option("--think-time", type=Duration(zero=True), default="30s", show_default=True, help="Pause between turns.")
@rare_option("--tenants", type=click.IntRange(1), default=1, show_default=True, help="Tenants that send as much each.")
@rare_option("--flood", type=POSITIVE, default=1.0, help="The first tenant sends this many times as much.")
@rare_option("--tier", multiple=True, metavar="NAME=SHARE", help="Share of the requests in a tier. Repeatable.")
@click.option("--config", type=click.Path(path_type=Path), help="The gateway's settings: slo, tiers, waiting.")
@click.option(
    "--policy",
    default="cheapest",
    show_default=True,
    help="How replicas are chosen: cheapest is the gateway's own; least-loaded, two-by-lot, affinity, random.",
)
@rare_option("--gate/--no-gate", default=True, show_default=True, help="Whether requests wait for room in the gateway.")
@click.option(
    "--compare",
    metavar="POLICY,…",
    help=f"Several policies on the same requests, such as cheapest,least-loaded,cheapest+{NO_GATE}.",
)
@rare_option(
    "--gateways", type=click.IntRange(1), default=1, show_default=True, help="Gateways that share the replicas."
)
@rare_option(
    "--fail",
    multiple=True,
    metavar="N@T[+T]",
    help="Replica N fails at a time, for a while: 0@60s+30s. For 2m by default.",
)
@click.option("--scale", metavar="MIN..MAX", help="Replicas come and go as the chart's autoscaling says.")
@rare_option("--scale-requests", type=POSITIVE, help="With --scale: requests/s that one replica is expected to take.")
@rare_option(
    "--cold-start",
    type=Duration(),
    default="3m",
    show_default=True,
    help="With --scale: the time that a replica takes to start.",
)
@rare_option(
    "--added",
    type=Duration(zero=True),
    default=ADDED,
    show_default=True,
    help="Time that network, gateway and Triton add to each first token.",
)
@rare_option("--cells", type=click.IntRange(1), help="Simulate only this many of the cells of 64 replicas.")
@rare_option("-j", "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@rare_option(
    "--block-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Tokens of a cache block; a trace's have 512.",
)
@rare_option("--price", type=POSITIVE, help="$ per GPU-hour.  [default: what `llmops plan` assumes]")
@click.option(
    "--slo", multiple=True, help="Objective: ttft:500ms, tpot:50ms or e2e:5s. Repeatable.  [default: of --config]"
)
@rare_option("--timing", default="auto", show_default=True, help="auto, silicon (measured tables) or roofline.")
@rare_option("--seed", type=int, default=0, show_default=True, help="Seed of all that is drawn at random.")
@click.option("--json", "json_path", type=OutputFile(), help="Write the whole run to this file.")
@click.option("--html", "html_path", type=OutputFile(), help="Write a page to this file.")
@help_all_option
def command(json_path: Path | None, html_path: Path | None, compare: str | None, **given: Any) -> None:
    """Simulate a fleet: replicas at the planner's pace behind the gateway's own routing, queue and limits.

    What comes are conversations (--rate, --day), a trace in Mooncake's format (--trace) or what a benchmark sent
    (--bench). Reported as `llmops bench` does, whose --compare takes these files too.
    """
    if sum(given[name] is not None for name in ("rate", "day", "trace", "bench")) != 1:
        raise click.UsageError("The load is not given, or given twice; give one of --rate, --day, --trace and --bench.")
    from llmops.perf.simulate.report import show, show_comparison

    console = table_console(PIPED)
    ways = _compared(compare) if compare else {_way(given["policy"], given["gate"]): (given["policy"], given["gate"])}
    documents = [
        (way, _document({**given, "policy": policy, "gate": gate}, terminal_console(stderr=True)))
        for way, (policy, gate) in ways.items()
    ]
    if compare:
        show_comparison(documents, console)
    else:
        show(documents[0][1], console)
    _write(documents, json_path, html_path)


def _compared(text: str) -> dict[str, tuple[str, bool]]:
    """Policies by what they are called, and whether a gate is before them."""
    from llmops.perf.simulate.policies import POLICIES

    ways = {}
    for way in filter(None, map(str.strip, text.split(","))):
        policy, _, rest = way.partition("+")
        if policy not in POLICIES:
            raise InputError(f"--compare {way} names no policy; choose from {', '.join(POLICIES)}.")
        if rest not in ("", NO_GATE):
            raise InputError(f"--compare {way}: only {NO_GATE} can follow the +; write {policy}+{NO_GATE}.")
        ways[way] = (policy, not rest)
    return ways


def _way(policy: str, gate: bool) -> str:
    return policy if gate else f"{policy}+{NO_GATE}"


def _document(given: dict[str, Any], console: Any) -> Document:
    from llmops.build.plan.buildplan import BuildPlan
    from llmops.perf.load.slo import parse_slo
    from llmops.perf.simulate.planned import engine_of
    from llmops.perf.simulate.report import document_of
    from llmops.perf.simulate.result import spec_of
    from llmops.perf.workloads.files import BLOCK_TOKENS

    plan = BuildPlan.load(given["plan_path"])
    given["replicas"] = _most(given["scale"]) or given["replicas"] or plan.replicas
    if given["trace"]:
        given["block_tokens"] = BLOCK_TOKENS
    engine = engine_of(plan, given["block_tokens"], given["timing"], given["price"])
    tiers, bounds, slos = _rules(given["config"], plan.model)
    slos = [parse_slo(text) for text in given["slo"]] or slos
    spec = replace(_spec(given, engine, tiers if given["gate"] else ()), bounds=bounds)
    simulating = f"simulating {_way(given['policy'], given['gate'])} …"
    with console.status(simulating) as status:

        def tell(seconds: float, requests: int) -> None:
            status.update(f"{simulating} {seconds:,.0f} s, {requests:,} requests")

        done = _simulated(given, spec, tell)
    if done.simulated and not done.run.records:
        raise InputError(f"--skip {given['skip']:g}: all requests came before that; leave out fewer seconds.")
    load = ("rate", "day", "peak", "duration", "turns", "system", "apps", "input_", "output", "think_time", "tenants")
    scaled = ("scale", "scale_requests", "cold_start") if given["scale"] else ()
    options = {name: given[name] for name in (*load, "flood", "tier", "speed", "skip", "added", "cells", *scaled)}
    options["slos"] = [str(slo) for slo in slos]
    options |= {"model": plan.model, "trace": str(given["trace"] or given["bench"] or "") or None}
    return document_of(done, slos, options, spec_of(spec))


def _spec(given: dict[str, Any], engine: Any, tiers: Any) -> FleetSpec:
    from llmops.perf.simulate.fleet import FleetSpec
    from llmops.perf.simulate.policies import POLICIES

    if given["policy"] not in POLICIES:
        raise InputError(f"--policy {given['policy']} is unknown; choose one of {', '.join(POLICIES)}.")
    return FleetSpec(
        engine,
        given["replicas"],
        given["policy"],
        tiers,
        given["gateways"],
        [_failure(text, sum(_sizes(given)[: given["cells"]])) for text in given["fail"]],
        seed=given["seed"],
        scaling=_scaling(given) if given["scale"] else None,
    )


def _sizes(given: dict[str, Any]) -> list[int]:
    """Of the cells. What is replayed goes to all replicas as one."""
    from llmops.perf.simulate.run import cells

    return [given["replicas"]] if given["trace"] or given["bench"] else cells(given["replicas"])


def _most(scale: str | None) -> int:
    """How many replicas there can be; 0 where nothing is scaled, or it is written as nobody can read it."""
    last = (scale or "").rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def _scaling(given: dict[str, Any]) -> Scaling:
    from llmops.perf.simulate.run import CELL
    from llmops.perf.simulate.scaling import Scaling

    match = re.fullmatch(r"(\d+)\.\.(\d+)", given["scale"])
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= CELL:
        raise InputError(f"--scale {given['scale']}: write MIN..MAX, such as 1..8, with at most {CELL}.")
    if given["fail"]:
        raise InputError("--scale and --fail exclude each other: which replicas there are is not known before.")
    targets = dict(Scaling().targets)
    if given["scale_requests"]:
        targets["requests"] = given["scale_requests"]
    return Scaling(int(match[1]), int(match[2]), targets, cold_start=given["cold_start"])


def _simulated(given: dict[str, Any], spec: FleetSpec, told: Callable[[float, int], None]) -> Simulated:
    from llmops.perf.report.document import read_document
    from llmops.perf.simulate.run import parts_of, simulate
    from llmops.perf.simulate.workload import of_document, of_trace

    if given["trace"] or given["bench"]:
        path, speed = given["trace"] or given["bench"], given["speed"]

        def replayed(_: float, __: int) -> Arrivals:
            return of_trace(path, speed) if given["trace"] else of_document(read_document(path), speed)

        return simulate(parts_of(spec, _sizes(given), replayed, given["skip"], given["added"]), told=told)

    def talking(share: float, number: int) -> Arrivals:
        return _conversations(given, share, number)

    parts = parts_of(spec, _sizes(given), talking, given["skip"], given["added"])
    return simulate(parts[: given["cells"]], given["jobs"], told)


def _conversations(given: dict[str, Any], share: float, number: int) -> Arrivals:
    from llmops.perf.simulate.workload import DAY, Conversations
    from llmops.perf.workloads.lengths import parse_lengths

    rate = given["rate"] or given["day"] * TURNS_A_DAY / DAY
    return Conversations(
        rate * share,
        given["duration"] or (DAY if given["day"] else 600.0),
        parse_lengths(given["turns"]),
        given["system"],
        given["apps"],
        parse_lengths(given["input_"]),
        parse_lengths(given["output"]),
        given["think_time"],
        3600 * given["start"],
        given["peak"] if given["day"] else 1.0,
        given["tenants"],
        given["flood"],
        _tiers(given["tier"]),
        given["block_tokens"],
        given["seed"] * 1009 + number,
    ).arrivals()


def _rules(config: Path | None, model: str) -> tuple[list[Tier], Bounds, list[Any]]:
    """Tiers, bounds and objectives of a gateway's settings."""
    from llmops.gateway.fleet.admission.waiting import bounds_of, tiers_of
    from llmops.gateway.settings import load_settings
    from llmops.perf.load.slo import Slo

    settings = load_settings(config)
    slo = settings.slo_of(model)
    known = (("ttft", slo.ttft_p95), ("tpot", slo.tpot_p95))
    return (
        tiers_of(settings, model),
        bounds_of(settings, model),
        [Slo(name, seconds) for name, seconds in known if seconds is not None],
    )


def _tiers(given: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    found = []
    for text in given:
        name, _, share = text.partition("=")
        try:
            found.append((name, float(share)))
        except ValueError:
            raise InputError(f"--tier {text}: write NAME=SHARE, such as batch=0.3.") from None
    return tuple(found) or (("", 1.0),)


def _failure(text: str, replicas: int) -> Failure:
    """`replicas`: how many are simulated."""
    from llmops.perf.simulate.fleet import Failure

    number, _, when = text.partition("@")
    at, _, lasts = when.partition("+")
    try:
        found = Failure(int(number), seconds(at), seconds(lasts or "2m"))
    except ValueError as error:
        raise InputError(f"--fail {text}: {error}; write N@TIME or N@TIME+TIME, such as 0@60s+30s.") from error
    if not 0 <= found.replica < replicas:
        raise InputError(f"--fail {text}: replicas are numbered from 0 to {replicas - 1}.")
    return found


def _write(documents: list[tuple[str, Document]], json_path: Path | None, html_path: Path | None) -> None:
    """With several, the name of each is put before the file's ending."""
    from llmops.perf.report.html import write_page

    for way, document in documents:
        for path, write in ((json_path, document.write), (html_path, lambda to, one=document: write_page(one, to))):
            if path is not None:
                to = path if len(documents) == 1 else path.with_name(f"{path.stem}-{way}{path.suffix}")
                write(to)
                click.echo(f"Wrote {to}")
