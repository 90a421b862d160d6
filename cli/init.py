"""`llmops init`: write a first llmops.yaml."""

import json
from pathlib import Path
from typing import Any

import click

from llmops.cli.options import FILE_PATH
from llmops.cli.output import print_line
from llmops.errors import InputError
from llmops.output_files import write_text


@click.command()
@click.argument("checkpoint", default="smollm2")
@click.option("-o", "--output", type=FILE_PATH, default="llmops.yaml", help="The file to write.")
@click.option("--name", help="Served model name.  [default: from the checkpoint]")
@click.option("--gpu", help="Plan the service for this kind of GPU, e.g. h100-sxm.  [default: the CPU of this machine]")
@click.option(
    "--quant", help="With --gpu: format of the weights, as in `llmops plan`.  [default: the checkpoint's own]"
)
@click.option("--qps", help="With --gpu: requests/s to serve.")
@click.option("--isl", help="With --gpu: tokens of a prompt, mean.")
@click.option("--osl", help="With --gpu: tokens of an answer, mean.")
@click.option("--prefix-hit", help="With --gpu: share of prompt tokens found in the prefix cache.")
@click.option("--ttft-p95", help="With --gpu: objective for the time to the first token, e.g. 500ms.")
@click.option("--ttft-p99", help="With --gpu: like --ttft-p95, for 99 of 100 answers.")
@click.option("--tpot-p95", help="With --gpu: objective for the time per token, e.g. 50ms.")
@click.option("--tpot-p99", help="With --gpu: like --tpot-p95, for 99 of 100 answers.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(
    checkpoint: str,
    output: Path,
    name: str | None,
    gpu: str | None,
    force: bool,
    **load: str | None,
) -> None:
    """Write an llmops.yaml for CHECKPOINT, and its schema beside it.

    Editors use the schema to complete the file.

    With --gpu, the service is planned as by `llmops plan`, and comments in the file give the plan's
    reasons.
    """
    from llmops.cli.service.service_file import read, schema
    from llmops.cli.service.template import SCHEMA, cpu_template, default_model_name, gpu_template

    if checkpoint.endswith((".yaml", ".yml")):
        raise InputError(f"{checkpoint} names the file to write, not a checkpoint; write -o {checkpoint}.")
    if output.exists() and not force:
        raise InputError(f"{output} already exists; choose another name with -o, or replace it with --force.")
    named = name or default_model_name(checkpoint)
    if gpu is None:
        typed = [f"--{flag.replace('_', '-')}" for flag, value in load.items() if value is not None]
        if typed:
            raise click.UsageError(
                f"{', '.join(typed)}: only a plan for GPUs has this; add --gpu, such as --gpu h100-sxm."
            )
        text = cpu_template(checkpoint, named)
    else:
        text = gpu_template(checkpoint, named, _planned(checkpoint, gpu, load))
    write_text(output, text)
    read(output)
    write_text(output.with_name(SCHEMA), json.dumps(schema(), indent=1) + "\n")
    print_line(
        f"Wrote {output}, and {SCHEMA} for editors. Next: llmops up -f {output}{' --profile laptop' if gpu else ''}"
    )


def _planned(checkpoint: str, gpu: str, load: dict[str, str | None]) -> Any:
    """Return the plan that `llmops plan` makes with these flags and its other defaults."""
    from llmops.cli import plan

    flags = [(f"--{flag.replace('_', '-')}", value) for flag, value in load.items() if value is not None]
    arguments = [checkpoint, "--gpu", gpu, *(part for flag in flags for part in flag)]
    with plan.command.make_context("init", arguments) as context:
        return plan.make_plan(
            checkpoint, {name: value for name, value in context.params.items() if name != "checkpoint"}
        )
