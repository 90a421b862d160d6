"""`llmops verify`: check that a deployment keeps its promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.options import EXISTING_FOLDER, OutputFile
from llmops.cli.output import console, print_line
from llmops.cli.service.command_defaults import verify_defaults
from llmops.cli.service.service_command import file_options, for_each_model
from llmops.errors import InputError
from llmops.perf.verify.findings import PARTS

if TYPE_CHECKING:
    from llmops.perf.verify.report import VerifyReport


@click.command(name="verify", cls=for_each_model(verify_defaults))
@file_options
@click.option(
    "--engine",
    type=EXISTING_FOLDER,
    help="Engine folder to check against; served for the checks unless --triton or --url is given.",
)
@click.option("--triton", metavar="HOST:PORT", help="A running Triton's gRPC address.")
@click.option(
    "--url",
    metavar="GATEWAY",
    help="A running gateway: checks what its OpenAI API shows, with the key in $LLMOPS_API_KEY.",
)
@click.option("-m", "--model", help="Served model.  [default: the only one]")
@click.option("--metrics", metavar="URL", help="Triton's metrics page.  [default: port 8002 of --triton's host]")
@click.option(
    "--only", multiple=True, type=click.Choice(PARTS), help="Run only this part of the checks; may be repeated."
)
@click.option(
    "--quick", is_flag=True, help="Run only checks that take seconds, which each new replica of a roll-out must pass."
)
@click.option(
    "--calibrate",
    type=OutputFile(),
    metavar="FILE",
    help="Also measure this host's step times, for `llmops plan --measured FILE`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", type=OutputFile(), help="Write an HTML report to this file.")
@click.option(
    "--textfile",
    type=EXISTING_FOLDER,
    metavar="FOLDER",
    help="Write llm_eval_score for Prometheus into this folder of the node exporter.",
)
def command(as_json: bool, html: Path | None, calibrate: Path | None, textfile: Path | None, **parameters: Any) -> None:
    """Check that a deployment does what its contract, checkpoint and plan promise.

    Without --engine, --triton or --url, the command checks the bundled SmolLM2 as `llmops up`
    builds it. The exit code is 0 if nothing is wrong, and 1 with one sentence per fault.
    """
    from llmops.cli.openai_client import api_key
    from llmops.perf.load.runner import run_async
    from llmops.perf.verify.report import TerminalProgress, show
    from llmops.perf.verify.run import VerifyOptions, verify

    if not (parameters["engine"] or parameters["triton"] or parameters["url"]):
        parameters["engine"] = _embedded_default()
    options = VerifyOptions(**parameters, api_key=api_key(), calibrate=calibrate is not None)
    options.check()
    if textfile is not None and (options.url or not options.has("answers")):
        raise InputError(
            "--textfile needs the part `answers`, which asks Triton: give --engine or --triton, not --url."
        )
    terminal = console(stderr=as_json, highlight=False)
    with TerminalProgress(terminal) as lines:
        report, measured = run_async(verify(options, lines))
    show(report, terminal)
    if calibrate is not None and measured is not None:
        measured.save(calibrate)
        print_line(f"Wrote {calibrate}: {len(measured.steps)} step times of {measured.device}", err=as_json)
    if textfile is not None:
        _write_textfile(report, textfile, as_json)
    if html is not None:
        from llmops.perf.verify.report import write_page

        write_page(report, html)
        print_line(f"Wrote {html}", err=as_json)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    if report.faults:
        click.get_current_context().exit(1)


def _write_textfile(report: VerifyReport, folder: Path, as_json: bool) -> None:
    from llmops.perf.verify.report import write_textfile

    written = write_textfile(report, folder)
    said = (
        f"Wrote {written}"
        if written
        else "llm_eval_score is not written, because the greedy answers were not compared."
    )
    print_line(said, err=as_json or written is None)


def _embedded_default() -> Path:
    from llmops.cli.stack import build_engine

    return build_engine("smollm2", "openvino", None, 1, None, None)
