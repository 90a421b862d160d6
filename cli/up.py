"""`llmops up`: build an engine, make its repository, and run Triton and a gateway."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmops.build.checkpoint.known_models import BUNDLED
from llmops.build.target_facts import NAMES, TargetName
from llmops.cli.options import ANY_PATH, FILE_PATH, reject_options, reject_other_options, serving_option
from llmops.cli.output import print_line
from llmops.cli.service.command_defaults import up_defaults
from llmops.cli.service.service_command import current_selection, file_options, for_all_models
from llmops.distribution import llmops_command

if TYPE_CHECKING:
    from llmops.cli.stack import Ready

#: Tokens of the bundled model's answers if a request sets no limit. The model seldom stops by
#: itself, and 512 tokens take about 20 seconds on two cores.
DEMO_TOKENS = 512
CHAT = "chat/completions"
FIRST_KEY = "The first key, shown this once (`llmops key` makes others):"


@click.command(cls=for_all_models(up_defaults))
@click.argument("checkpoint", default="smollm2")
@file_options
@click.option("--target", type=click.Choice(NAMES), default="openvino", help="Kind of engine to build.")
@click.option(
    "--quant",
    help="Weights of the engine: see `llmops build`.  [default: int8 on openvino, fp8 elsewhere; encoders: none]",
)
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Tensor-parallel GPUs.")
@serving_option
@click.option("--name", help="Served model name.  [default: from the checkpoint]")
@click.option("--host", help="Address that the gateway listens on; also $LLMOPS_HOST.  [default: 127.0.0.1]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of the gateway; also $LLMOPS_PORT. 0 takes any free port.  [default: 9000]",
)
@click.option(
    "--dir",
    "folder",
    type=ANY_PATH,
    help="Folder for engine and repository.  [default: ~/.cache/llmops/up; the repository of an ENGINE: beside it]",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 64),
    default=1,
    help="Number of Tritons, each on its own GPUs; when a Triton ends, another continues its answers.",
)
@click.option(
    "--store", metavar="URL", help="Store of keys and usage, administered at /api/: sqlite:///FILE or postgresql://…."
)
@click.option(
    "--open", "open_", is_flag=True, default=None, help="Require no API key, even where others can reach the gateway."
)
@click.option("--config", type=FILE_PATH, help="Gateway settings (YAML).")
def command(
    checkpoint: str,
    target: TargetName,
    quant: str | None,
    tp: int,
    serving: str | None,
    name: str | None,
    host: str | None,
    port: int | None,
    folder: Path | None,
    replicas: int,
    store: str | None,
    open_: bool | None,
    config: Path | None,
) -> None:
    """Serve CHECKPOINT at an OpenAI endpoint: build, repository, Triton, gateway.

    CHECKPOINT is what `llmops build` takes, or an engine folder that it made. An engine that was
    built before is used again. Ctrl-C ends everything after open answers have finished; a second
    Ctrl-C ends everything at once.

    The bundled model ends an answer after 512 tokens where neither the request nor the gateway's
    settings say more.

    On a --host that others can reach, the gateway requires keys from the store (--store, or
    store.db in the cache folder). If the store has no key yet, the first key is created and printed
    once.

    With -f all models of the file are built beside it, into engines/NAME and repository, and
    served.
    """
    from llmops.cli.stack import Stack, build_described, build_engine, is_engine_folder, make_repository

    started, file = time.monotonic(), current_selection()
    if file is not None:
        reject_other_options(
            "With -f, the file says what is built", "described", "profile", "host", "port", "store", "open_"
        )
    elif is_engine_folder(checkpoint):
        reject_options(f"{checkpoint} is an engine that was built already", "target", "quant", "tp")
    tokens = DEMO_TOKENS if file is None and checkpoint in BUNDLED else None
    with Stack(host, port, config if file is None else file.layers, store, open_, tokens) as stack:
        if stack.first_key:
            click.echo(f"{FIRST_KEY}\n{stack.first_key}\n")
        if file is not None:
            repository, models = build_described(file, stack.tenants_apart)
        else:
            engine = build_engine(checkpoint, target, quant, tp, name, folder)
            repository, models = make_repository(engine, folder, serving or "", stack.tenants_apart, name)
        print_line(f"Repository {repository}. Starting Triton ...", err=True)
        stack.start_tritons(repository, replicas)
        stack.start_versions(models, repository.parent / f"{repository.name}-versions")
        first = next(iter(models.values()))
        stack.run_gateway(list(models), lambda ready: _announce(ready, first, time.monotonic() - started))


def _announce(ready: Ready, engine: Path, seconds: float) -> None:
    """Print what runs, with an example request that the first model can answer."""
    url, (path, body) = ready.url, _first_request(engine)
    key = " -H 'authorization: Bearer KEY'" if ready.keys_needed else ""
    click.echo(
        f"\nReady after {seconds:.0f} s: {url}/v1 serves {', '.join(ready.models)}.\n{ready.exposure}\n\nTry it:\n"
    )
    text = f'{{"model":"{ready.models[0]}",{body}}}'
    click.echo(f"  curl -N {url}/v1/{path}{key} -H 'content-type: application/json' \\\n    -d '{text}'\n")
    if path == CHAT:
        click.echo(f"  {'LLMOPS_API_KEY=KEY ' if key else ''}{llmops_command()} chat --url {url}/v1\n")
    click.echo("Ctrl-C ends everything.")


def _first_request(engine: Path) -> tuple[str, str]:
    """Return the path below /v1 and the JSON fields of a request that an engine can answer."""
    from llmops.build.engine_folder.manifest import EngineManifest
    from llmops.build.engine_folder.manifest_extras import CrossEncoderExtra, EncoderExtra

    extra = EngineManifest.load(engine).extra
    question = "What is the capital of France?"
    if isinstance(extra, EncoderExtra):
        return "embeddings", f'"input":"{question}"'
    if isinstance(extra, CrossEncoderExtra):
        return "rerank", f'"query":"{question}","documents":["Paris is its capital.","Bread is made of flour."]'
    return CHAT, f'"stream":true,"messages":[{{"role":"user","content":"{question}"}}]'
