"""`llmops bench`: load-test an OpenAI endpoint or Triton itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.options import ANY_PATH, Duration, OutputFile, option_groups, reject_options, reject_other_options
from llmops.cli.output import console, print_line
from llmops.cli.service.command_defaults import bench_defaults
from llmops.cli.service.service_command import file_options, for_each_model
from llmops.errors import InputError, LlmopsError

if TYPE_CHECKING:
    from llmops.perf.options import BenchOptions
    from llmops.perf.report.document import Document

POSITIVE = click.FloatRange(0, min_open=True)
VIA = ("chat", "completions", "engine", "ensemble")
_EXTRA = """write a JSON object in single quotes, such as --extra '{"top_k": 20}'"""


@option_groups(
    {
        "Target": ("model", "via", "described", "profile", "header", "extra", "timeout"),
        "Load": ("concurrency", "rate", "arrival", "trace", "requests", "duration", "warmup"),
        "Prompts": (
            *("input_", "output", "ignore_eos", "prompts", "prefix_tokens", "turns", "think_time", "tools", "cancel"),
            "seed",
        ),
        "Objectives": ("slo", "slo_share", "sweep"),
        "Report": ("json_path", "html_path", "compare"),
    }
)
@click.command(name="bench", cls=for_each_model(bench_defaults))
@file_options
@click.argument("url", default="http://127.0.0.1:9000/v1")
@click.option("-m", "--model", help="Model to test.  [default: the first one that the server lists]")
@click.option("--via", type=click.Choice(VIA), help="Layer to test.  [default: chat, or engine for grpc:// addresses]")
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1),
    help="Number of users, each with one request at a time. With --rate, --sweep or --trace: maximum requests at once, "
    "and the wait of further requests counts as latency.  [default: 4; unlimited]",
)
@click.option(
    "-r", "--rate", type=POSITIVE, help="Requests/s to send, however slow the server is; with --sweep, the first rate."
)
@click.option(
    "--arrival",
    type=click.Choice(["constant", "poisson", "bursty"]),
    default="poisson",
    help="With --rate: distribution of the time between two requests.",
)
@click.option("--trace", type=ANY_PATH, help="Replay a JSONL trace (timestamp, input_length, …).")
@click.option("-n", "--requests", type=click.IntRange(1), help="Sessions to start.  [default: 100]")
@click.option(
    "-d",
    "--duration",
    type=Duration(),
    help="Time during which sessions start, such as 60s.  [default: no limit; 30s per step of a sweep]",
)
@click.option("--warmup", type=click.IntRange(0), help="Warm-up sessions, not counted.  [default: one per user]")
@click.option("-i", "--input", "input_", default="64", help="Number of prompt tokens, a distribution.")
@click.option("-o", "--output", default="64", help="Number of answer tokens, a distribution.")
@click.option("--prompts", type=ANY_PATH, help="Your own prompts: JSONL, or lines of text.")
@click.option(
    "--prefix-tokens",
    type=click.IntRange(0),
    default=0,
    help="Number of tokens of a system prompt that all requests share.",
)
@click.option("--turns", help="Turns per conversation, a distribution.  [default: 1]")
@click.option("--think-time", type=Duration(zero=True), default="0s", help="Pause between an answer and the next turn.")
@click.option("--tools", type=click.IntRange(0), default=0, help="Number of tools to offer.")
@click.option("--cancel", type=click.FloatRange(0, 1), default=0.0, help="Share of requests cancelled midway.")
@click.option(
    "--slo",
    multiple=True,
    help="Objective of each request: ttft:200ms, tpot:50ms, itl:100ms or e2e:5s. Objective of a share of the "
    "requests: ttft_p99:700ms or availability:99.9%. Repeatable.",
)
@click.option("--sweep", is_flag=True, help="Find the highest rate that meets the objectives.")
@click.option(
    "--fail-under",
    "slo_share",
    metavar="SHARE",
    type=click.FloatRange(0, 1),
    default=0.99,
    help="Share of requests that must meet objectives without a percentile; below it the exit code is 1.",
)
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Ask for exactly --output tokens.")
@click.option("--extra", help="JSON object merged into every request body.")
@click.option("-H", "--header", multiple=True, help="'Name: value', sent with every request.")
@click.option("--timeout", type=Duration(), default="10m", help="Maximum time of one request.")
@click.option("--seed", type=int, default=0, help="Seed of all random choices.")
@click.option("--json", "json_path", type=OutputFile(), help="Write the whole run to this file; - for stdout.")
@click.option("--html", "html_path", type=OutputFile(), help="Write a page with plots to this file.")
@click.option("--compare", nargs=2, type=ANY_PATH, help="Compare two --json files; sends no load.")
def command(**parameters: Any) -> None:
    """Load-test URL: an OpenAI endpoint (http://host:port/v1), or Triton itself (grpc://host:port).

    Lengths are distributions: 128, uniform:64,256, normal:256,64, lognormal:256,0.6,
    exponential:128, choice:32@0.8,2048@0.2. Latencies are measured from the moment a request is
    sent.

    A server that asks for a key gets LLMOPS_API_KEY. With --slo the exit code is 1 when too few
    requests meet an objective.
    """
    json_path, html_path, compare = parameters.pop("json_path"), parameters.pop("html_path"), parameters.pop("compare")
    if compare:
        reject_other_options("--compare reads two files and sends no load", "compare")
        _compare(compare[0], compare[1])
        return
    if parameters["rate"] is None and not parameters["sweep"]:
        reject_options("Only --rate and --sweep choose the time between requests", "arrival")
    if not parameters["slo"]:
        reject_options("Without --slo no request has an objective", "slo_share")
    document = _run(_options(**parameters), quiet=str(json_path) == "-")
    _write(document, json_path, html_path)
    missed = document.missed_objectives()
    if missed:
        raise LlmopsError(missed)


def _options(**parameters: Any) -> BenchOptions:
    from llmops.cli.openai_client import api_key
    from llmops.perf.load.objectives import parse_objective
    from llmops.perf.options import BenchOptions
    from llmops.perf.workloads.lengths import parse_lengths

    parameters["via"] = parameters["via"] or ("engine" if parameters["url"].startswith("grpc://") else "chat")
    parameters["requests"] = parameters["requests"] or (
        None if parameters["duration"] or parameters["trace"] or parameters["sweep"] else 100
    )
    parameters["input"], parameters["output"] = (
        parse_lengths(parameters.pop("input_")),
        parse_lengths(parameters["output"]),
    )
    parameters["turns"] = parse_lengths(parameters["turns"]) if parameters["turns"] else None
    parameters["slos"] = [parse_objective(text) for text in parameters.pop("slo")]
    parameters["cancel_share"] = parameters.pop("cancel")
    parameters["api_key"] = api_key()
    parameters["headers"] = dict(_header(text) for text in parameters.pop("header"))
    parameters["extra"] = _extra(parameters["extra"])
    return BenchOptions(**parameters)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text:
        raise InputError(f"--header {text!r} has no name or no colon; write -H 'Name: value'.")
    return name.strip(), value.strip()


def _extra(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise InputError(f"--extra {text} is not JSON ({error}); {_EXTRA}.") from error
    if not isinstance(value, dict):
        raise InputError(f"--extra {text} is not a JSON object; {_EXTRA}.")
    return value


def _run(options: BenchOptions, quiet: bool) -> Document:
    from llmops.perf.bench import bench
    from llmops.perf.load.runner import run_async
    from llmops.perf.report.progress import Bar
    from llmops.perf.report.terminal import show

    terminal = console(stderr=quiet)
    with Bar(terminal) as bar:
        document = run_async(bench(options, bar))
    show(document, terminal)
    return document


def _write(document: Document, json_path: Path | None, html_path: Path | None) -> None:
    if str(json_path) == "-":
        click.echo(json.dumps(document.to_json()))
    elif json_path is not None:
        document.write(json_path)
        print_line(f"Wrote {json_path}")
    if html_path is not None:
        from llmops.perf.report.html_page import write_page

        write_page(document, html_path)
        print_line(f"Wrote {html_path}")


def _compare(first: Path, second: Path) -> None:
    from llmops.perf.report.compare import show_comparison
    from llmops.perf.report.document import read_document

    show_comparison(read_document(first), read_document(second), console())
