"""`llmops rollout`: move a model to another version, watch it, and go back."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.accounts.account_options import admin_options
from llmops.cli.accounts.admin_client import AdminClient, key_reference
from llmops.cli.accounts.param_types import DURATION, typed_values
from llmops.cli.options import EXISTING_FOLDER, OutputFile
from llmops.cli.output import (
    format_timestamp,
    print_fields,
    print_json,
    print_line,
    print_result,
    print_results,
    print_table,
)
from llmops.errors import ServerError
from llmops.input_files import MALFORMED

if TYPE_CHECKING:
    from llmops.control.admin.schemas import AuditEntryRead
    from llmops.control.rollouts.schemas import RolloutRead, VersionRead

#: The next step of a roll-out in each state, and the command for it.
_NEXT = {
    "starting": "wait; `llmops up` or `llmops control` with this store starts and checks the replicas",
    "shifting": "give {candidate} more: llmops rollout promote {model}",
    "waiting": "approve the next step: llmops rollout promote {model}",
    "paused": "continue: llmops rollout resume {model}",
    "keeping": "go back while {stable} is kept: llmops rollout rollback {model}",
}


#: The heading of the plot of the new version's values relative to the old version's, from half to
#: twice the value.
SCALE = "÷2 ····· = ····· ×2"


@click.group("rollout")
def command() -> None:
    """Move a model to another version step by step, and go back when it is worse.

    `llmops up` with a store, or `llmops control`, carries a roll-out out.
    """


@command.command("start")
@click.argument("model")
@click.option(
    "--to",
    "engine",
    type=EXISTING_FOLDER,
    help="Engine folder of the new version, which `llmops up` serves beside the old one.",
)
@click.option(
    "--replica", "replicas", multiple=True, metavar="HOST:PORT", help="A running replica instead of --to; repeatable."
)
@click.option("--name", help="Name of the version.  [default: the folder's name]")
@click.option(
    "--percent",
    type=click.FloatRange(0, 100, min_open=True),
    default=5,
    help="Percent of the requests in the first step; then 25, 50 and 100.",
)
@click.option("--auto", is_flag=True, help="Let the judge move the weights, in both directions.")
@click.option("--approve", is_flag=True, help="Wait for `promote` after each step that the judge has passed.")
@click.option("--keep-old", type=DURATION, default="30m", help="How long the old replicas are kept.")
@click.option("--drain-timeout", type=DURATION, default="5m", help="Time for running answers before replicas stop.")
@click.option(
    "--twin",
    is_flag=True,
    help="Where a GPU is free, compare with old replicas whose caches are as cold as the new ones'.",
)
@click.option("--allow-capacity-loss", is_flag=True, help="Stop old replicas first where no GPU is free.")
@click.option("--webhook", metavar="URL", help="URL that receives each transition as JSON.")
@click.option("--min-requests", type=click.IntRange(1), help="Requests of the new version in a step.  [default: 300]")
@click.option("--min-time", type=DURATION, help="Minimum time of a step.  [default: 1m]")
@click.option(
    "--analysis",
    multiple=True,
    metavar="PROMQL",
    help="Condition that must hold as well, as 'QUERY < 0.1'; repeatable.",
)
@click.option("--prometheus", metavar="URL", help="Prometheus that answers --analysis.")
@admin_options
def start(
    model: str,
    engine: Path | None,
    replicas: tuple[str, ...],
    name: str | None,
    keep_old: timedelta,
    drain_timeout: timedelta,
    min_time: timedelta | None,
    admin: AdminClient,
    as_json: bool,
    **options: Any,
) -> None:
    """Start a roll-out of MODEL.

    New replicas start beside the old ones, then get more and more of the requests.
    """
    from llmops.build.engine_folder.manifest import EngineManifest
    from llmops.control.rollouts.schemas import RolloutCreate, RolloutRead

    if (engine is None) == (not replicas):
        raise click.UsageError("Give the new version: --to ENGINE, or --replica HOST:PORT for one that runs.")
    if engine is not None:
        # read the manifest first, so that a folder without one is rejected before replicas start
        EngineManifest.load(engine)
    fallback = engine.resolve().name if engine is not None else replicas[0].removeprefix("dns:").partition(":")[0]
    body = RolloutCreate(
        model=model,
        name=name or fallback,
        engine=str(engine.resolve()) if engine is not None else "",
        replicas=replicas,
        keep_old=keep_old.total_seconds(),
        drain_timeout=drain_timeout.total_seconds(),
        **typed_values({"min_seconds": min_time.total_seconds() if min_time is not None else None, **options}),
    )
    rollout = admin.request("POST", ("rollouts",), RolloutRead, body=body)
    text = f"{model}: {rollout.candidate} starts beside {rollout.stable}. Watch it: llmops rollout status {model}"
    print_result(rollout, as_json, text)


@command.command("status")
@click.argument("model", required=False)
@admin_options
def status(model: str | None, admin: AdminClient, as_json: bool) -> None:
    """Show the latest roll-out of MODEL, or of every model.

    Shown are the versions, the verdict, and why.
    """
    from llmops.control.rollouts.schemas import RolloutQuery, RolloutRead

    query = RolloutQuery(**typed_values({"model": model}))
    found = admin.request("GET", ("rollouts",), tuple[RolloutRead, ...], query=query)
    latest = {rollout.model: rollout for rollout in reversed(found)}
    if as_json:
        print_json([rollout.data() for rollout in latest.values()])
        return
    if not latest:
        click.echo("No roll-outs. Start one: llmops rollout start MODEL --to ENGINE", err=True)
    problem = None
    for rollout in latest.values():
        try:
            _print_status(rollout)
        except MALFORMED as error:
            problem = error
    if problem is not None:
        raise ServerError(
            "The server's verdict has a form that this llmops does not know; use the server's version of llmops."
        ) from problem


def _action(name: str, event: str, text: str) -> click.Command:
    @command.command(name, help=text)
    @click.argument("model")
    @click.option("--reason", default="", show_default=False, help="The reason, for the history.")
    @admin_options
    def run(model: str, reason: str, admin: AdminClient, as_json: bool, full: bool = False) -> None:
        from llmops.control.rollouts.schemas import RolloutChange, RolloutRead

        body = RolloutChange(model=model, action="promote fully" if full else event, reason=reason)  # type: ignore[arg-type]
        rollout = admin.request("POST", ("rollouts", "actions"), RolloutRead, body=body)
        text = f"{model}: {rollout.state}, {rollout.percent:g} % of the requests go to {rollout.candidate}."
        print_result(rollout, as_json, text)
        if event == "rollback" and rollout.settings.get("allow_capacity_loss") and not as_json:
            took = _start_seconds(admin, rollout)
            known = f" Replicas of {rollout.candidate} took {took:.0f} s to start." if took else ""
            print_line(f"Replicas of {rollout.stable} that had to make room start again.{known}")

    return run


def _start_seconds(admin: AdminClient, rollout: RolloutRead) -> float:
    """Return the seconds from the start of a roll-out to its first requests, or 0 without any."""
    from llmops.control.rollouts.schemas import RolloutHistory, RolloutQuery

    found = admin.request("GET", ("rollouts", "history"), RolloutHistory, query=RolloutQuery(model=rollout.model))
    times = {one.action: one.created_at for one in found.entries if one.detail.get("rollout") == rollout.id}
    # the history is newest first, so the earliest of several equal actions remains
    begun = times["rollout.start"]
    return (times.get("rollout.shifting", begun) - begun).total_seconds()


promote = _action("promote", "promote", "Go to the next step, or approve it.")
promote.params.insert(0, click.Option(["--full"], is_flag=True, help="Give the new version all requests at once."))
_action("pause", "pause", "Keep the weights as they are.")
_action("resume", "resume", "Continue a paused roll-out in its step.")
_action("rollback", "rollback", "Give all requests back to the old version.")


@command.command("history")
@click.argument("model", required=False)
@admin_options
def history(model: str | None, admin: AdminClient, as_json: bool) -> None:
    """Show every transition with its actor and reason, newest first."""
    from llmops.control.rollouts.schemas import RolloutHistory, RolloutQuery

    query = RolloutQuery(**typed_values({"model": model}))
    found = admin.request("GET", ("rollouts", "history"), RolloutHistory, query=query)
    empty = "No roll-outs yet. Start one: llmops rollout start MODEL --to ENGINE"
    columns = ("when", "who", "model", "state", "new", "version", "reason")
    print_results(found.entries, as_json, empty, columns, _history_row, right=("new",))


def _history_row(entry: AuditEntryRead) -> list[str]:
    detail = entry.detail
    return [
        format_timestamp(entry.created_at),
        entry.actor,
        entry.subject,
        entry.action.removeprefix("rollout."),
        f"{detail['percent']:g} %" if "percent" in detail else "",
        str(detail.get("candidate") or detail.get("version") or ""),
        str(detail.get("reason") or detail.get("key") or ""),
    ]


@command.command("pin")
@click.argument("model")
@click.argument("key")
@click.argument("version", required=False)
@admin_options
def pin(model: str, key: str, version: str | None, admin: AdminClient, as_json: bool) -> None:
    """Give all requests of KEY, an id or the key itself, to VERSION of MODEL.

    Without VERSION, the pin is removed.
    """
    from llmops.control.rollouts.schemas import PinCreate

    body = PinCreate(model=model, key=key_reference(key), version=version)
    pinned = admin.request("POST", ("rollouts", "pins"), PinCreate, body=body)
    text = f"{pinned.key} gets {version} of {model}." if version else f"{pinned.key} gets {model} by the weights again."
    print_result(pinned, as_json, text)


@command.command("rehearse")
@click.option("--from", "old", type=EXISTING_FOLDER, help="Old engine folder.")
@click.option("--to", "new", type=EXISTING_FOLDER, help="New engine folder.")
@click.option(
    "--fault",
    type=click.Choice(["slow", "errors", "scrambled", "language", "quality"]),
    help="Plant a fault into the new version.",
)
@click.option("--json", "output", type=OutputFile(), metavar="FILE", help="Write the report to this file.")
@click.option("--same", is_flag=True, help="Roll out to a copy of the old version.")
def rehearse(old: Path | None, new: Path | None, fault: str | None, output: Path | None, same: bool) -> None:
    """Perform a whole roll-out on this machine, under load.

    Without folders, the old version is SmolLM2 in float32, and the new version is SmolLM2 in INT8.
    The tolerated loss of quality is the loss between both versions without a fault. The rehearsal
    takes some minutes. The exit code is 1 if a request failed, a token was doubled, or a planted
    fault was promoted or not tried.
    """
    import asyncio
    import json
    from dataclasses import asdict

    from llmops.cli.rehearsal import rehearse as run
    from llmops.cli.stack import build_engine
    from llmops.output_files import write_text

    if same and new is not None:
        raise click.UsageError("--same and --to both name the new version; leave one of them out.")
    old = old or build_engine("smollm2", "openvino", "int8" if same else "none", 1, None, None)
    new = old if same else new or build_engine("smollm2", "openvino", "int8", 1, None, None)
    report = asyncio.run(run(old, new, fault or "", lambda line: click.echo(line, err=True)))
    data = asdict(report)
    if output is not None:
        write_text(output, json.dumps(data, indent=2) + "\n")
    print_fields(
        [(f"{name.replace('_', ' '):25}", str(value)) for name, value in data.items() if value not in ("", [])]
    )
    wanted = "rolled back" if fault else "promoted"
    if fault and not report.canary_requests:
        click.echo("The new version got no requests, so the fault was not tried; see the reason.", err=True)
        click.get_current_context().exit(1)
    if report.failed > report.failed_by_fault or report.doubled_tokens or report.verdict != wanted:
        click.get_current_context().exit(1)


def _print_status(rollout: RolloutRead) -> None:
    print_fields(
        [
            ("model", rollout.model),
            ("roll-out", f"{rollout.stable} → {rollout.candidate}"),
            ("state", f"{rollout.state} since {format_timestamp(rollout.changed_at)} UTC"),
            ("reason", rollout.reason or "-"),
            ("compared", _comparison(rollout)),
        ]
    )
    if following := _next(rollout):
        print_fields([("next", following.format(**vars(rollout)))])
    click.echo()
    rows = [
        [one.name, f"{one.weight:g} %", "█" * min(round(one.weight / 5), 20), one.state, _places(rollout, one)]
        for one in rollout.versions
        if one.state != "retired" or one.name in (rollout.stable, rollout.candidate)
    ]
    print_table(("version", "weight", "", "state", "replicas"), rows, right=("weight",))
    if rollout.verdict is not None:
        click.echo()
        print_line(f"verdict: {rollout.verdict['decision']}. {rollout.verdict['reason']}")
        click.echo()
        rows = [
            [
                row["metric"],
                _value(row["stable"], row["unit"]),
                _value(row["canary"], row["unit"]),
                _mark(row["stable"], row["canary"]),
                row["state"],
                row["note"],
            ]
            for row in rollout.verdict["rows"]
        ]
        columns = ("metric", rollout.stable, rollout.candidate, SCALE, "judged", "note")
        print_table(columns, rows, right=columns[1:3])


def _next(rollout: RolloutRead) -> str:
    """Return the next step that a user can take, or an empty text if the judge acts next."""
    if rollout.state == "shifting" and (rollout.settings.get("auto") or rollout.settings.get("approve")):
        return ""
    return _NEXT.get(rollout.state, "")


def _places(rollout: RolloutRead, version: VersionRead) -> str:
    """Return the replicas of a version.

    The replicas of the first version may be in the gateways' settings instead.
    """
    return ", ".join(version.replicas) or ("none yet" if version.name == rollout.candidate else "settings")


def _comparison(rollout: RolloutRead) -> str:
    pair = (rollout.stable, rollout.candidate)
    active = [one.name for one in rollout.versions if one.state == "active" and one.name not in pair]
    if twin := next((name for name in active if name.endswith("-twin")), None):
        return f"with {twin}, a twin of {rollout.stable} with as many requests and as cold a cache"
    return f"with {rollout.stable}; TTFT for equal numbers of uncached tokens, because a new cache is cold"


def _mark(stable: float | None, canary: float | None) -> str:
    """Return a plot of the new version's value on SCALE, whose middle is the old value."""
    if stable is None or canary is None:
        return ""
    half = len(SCALE) // 2
    if not stable or not canary:
        at = half if stable == canary else 2 * half if canary else 0
    else:
        at = min(max(round(half + half * math.log2(canary / stable)), 0), 2 * half)
    places = list("·" * half + "│" + "·" * half)
    places[at] = "●"
    return "".join(places)


def _value(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.4g} {unit}".rstrip()
