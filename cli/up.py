"""`llmops up`: build, repository, Triton and gateway in one process tree."""

from __future__ import annotations

import time
from pathlib import Path

import click

from llmops.build.target_names import NAMES, TargetName


@click.command()
@click.argument("checkpoint", default="smollm2")
@click.option("--target", type=click.Choice(NAMES), default="openvino", show_default=True)
@click.option("--quant", help="As in `llmops build`.  [default: int8 on openvino, fp8 elsewhere]")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel GPUs.")
@click.option("--name", help="Served model name. Default: from the checkpoint.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the gateway.")
@click.option("--port", type=click.IntRange(0, 65535), default=9000, show_default=True, help="0 takes any free port.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Where engine and repository go.  [default: ~/.cache/llmops/up; the repository of an ENGINE: beside it]",
)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Gateway settings (YAML).")
def command(
    checkpoint: str,
    target: TargetName,
    quant: str | None,
    tp: int,
    name: str | None,
    host: str,
    port: int,
    folder: Path | None,
    config: Path | None,
) -> None:
    """From CHECKPOINT to a running OpenAI endpoint: build, repository, Triton, gateway.

    CHECKPOINT is what `llmops build` takes, or an engine folder that it made. What was built before is used again.
    Ctrl-C ends all of it: open answers are finished first, unless there is a second one.
    """
    from llmops.cli.stack import Stack, build_engine, make_repository

    started = time.monotonic()
    with Stack(host, port, config) as stack:
        engine = build_engine(checkpoint, target, quant, tp, name, folder)
        repository = make_repository(engine, folder)
        click.echo(f"Engine {engine}, repository {repository}. Starting Triton ...", err=True)
        stack.start_triton(repository)
        stack.run_gateway(lambda url, model, exposure: _announce(url, model, exposure, time.monotonic() - started))


def _announce(url: str, model: str, exposure: str, seconds: float) -> None:
    body = (
        f'{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"What is the capital of France?"}}]}}'
    )
    click.echo(f"\nReady after {seconds:.0f} s: {url}/v1 serves {model}.\n{exposure}\n\nTry it:\n")
    click.echo(f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n")
    click.echo(f"  llmops chat --url {url}/v1\n\nCtrl-C ends everything.")
