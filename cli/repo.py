"""`llmops repo`: make a Triton model repository from engine folders."""

import json
from pathlib import Path

import click

from llmops.cli.options import ANY_PATH, serving_option
from llmops.cli.output import print_line
from llmops.cli.service.command_defaults import repo_defaults
from llmops.cli.service.service_command import current_selection, file_options, for_all_models


@click.command(cls=for_all_models(repo_defaults))
@click.argument("engines", nargs=-1, required=True, metavar="ENGINE...")
@file_options
@click.option("-o", "--output", required=True, type=ANY_PATH, help="Folder for the repository.")
@click.option(
    "--max-queue-size",
    type=click.IntRange(0),
    help="Sequences that may wait for each engine besides its batch; more are refused (503).  [default: 4 batches]",
)
@click.option(
    "--gpus",
    multiple=True,
    metavar="NAME=0,1",
    help="GPUs of an engine.  [default: different GPUs for each of several engines]",
)
@serving_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    engines: tuple[str, ...],
    output: Path,
    max_queue_size: int | None,
    gpus: tuple[str, ...],
    serving: str | None,
    as_json: bool,
) -> None:
    """Put engine folders into a Triton model repository.

    Each ENGINE is a folder that `llmops build` made, or NAME=FOLDER to serve it under another name.
    A served model NAME becomes four Triton models: NAME (text in, text out), NAME-preprocessing,
    NAME-tensorrt_llm (tokens in, tokens out) and NAME-postprocessing. An earlier repository in the
    output folder is replaced in one go.
    """
    from llmops.model_repository.generate import generate_repository, read_engines
    from llmops.model_repository.gpu_assignment import parse_gpus

    file = current_selection()
    entries = read_engines(engines, max_queue_size, parse_gpus(gpus), serving or (file.serving if file else ""))
    models = generate_repository(entries, output)
    if as_json:
        names = [entry.name for entry in entries]
        click.echo(json.dumps({"repository": str(output.resolve()), "served": names, "models": models}))
        return
    for entry in entries:
        on = f", GPU {','.join(map(str, entry.gpus))}" if entry.gpus else ""
        print_line(f"{entry.name}  {entry.manifest.target}, {entry.manifest.architecture}, from {entry.directory}{on}")
    print_line(f"{len(models)} Triton models in {output}. Serve them: llmops serve {output}")
