"""`llmops build`: checkpoint to engine folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmops.build.manifest import EngineManifest


@click.command()
@click.argument("checkpoint")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The engine folder to make.")
@click.option("--target", type=click.Choice(["openvino", "tensorrt", "pytorch"]), default="openvino", show_default=True)
@click.option(
    "--quant", default="none", show_default=True, help="Weights: none, int8, int4 (openvino); fp8, int4_awq, …"
)
@click.option("--kv-cache", default="auto", show_default=True, help="KV cache precision.")
@click.option("--group-size", type=int, help="Weights that share a scale, for 4-bit formats.")
@click.option("--tp", type=int, default=1, help="Tensor-parallel GPUs.")
@click.option("--pp", type=int, default=1, help="Pipeline-parallel GPUs.")
@click.option("--ep", type=int, default=1, help="Expert-parallel GPUs; divides --tp.")
@click.option("--gpu", help="GPU the engine is for, e.g. h100-sxm.")
@click.option("--max-batch-size", type=int, help="Requests in one batch.")
@click.option("--max-seq-len", type=int, help="Prompt plus answer, in tokens. Default: the model's context.")
@click.option("--max-num-tokens", type=int, help="Tokens in one engine step.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Build what `llmops plan --save FILE` planned: target, precision, layout and limits come from it.",
)
@click.option("--calib-dataset", help="Text for calibration (a file, or a dataset name).")
@click.option("--calib-size", type=int, help="Samples for calibration.")
@click.option("--calib-seq-len", type=int, help="Tokens per calibration sample.")
@click.option("--name", help="Served model name. Default: from the checkpoint.")
@click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="A setting of the target's own.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def command(checkpoint: str, as_json: bool, options: tuple[str, ...], plan_file: Path | None, **fields: Any) -> None:
    """Build an engine folder from CHECKPOINT.

    CHECKPOINT is a Hugging Face folder, a GGUF file, a hub id (owner/name, downloaded) or the bundled model smollm2.
    The same build again takes under a second; a build that fails or is interrupted leaves nothing behind.
    """
    from llmops.build.engine import build
    from llmops.build.progress import make_progress
    from llmops.build.spec import BuildSpec

    if plan_file:
        fields |= _planned(plan_file, fields)
    spec = BuildSpec(checkpoint=checkpoint, options=_options(options), **fields)
    manifest, cached = build(spec, make_progress())
    if as_json:
        click.echo(manifest.model_dump_json(indent=2))
    else:
        click.echo(_summary(manifest, spec.output, cached))


def _planned(file: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that the plan sets, and the plan. Raises InputError when a flag says something else."""
    from llmops.build.plan.buildplan import BuildPlan
    from llmops.errors import InputError

    plan, context = BuildPlan.load(file), click.get_current_context()
    fields = {name: value for name, value in plan.build_options().items() if value is not None}
    for name, value in fields.items():
        typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if typed and given[name] != value:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} {given[name]} contradicts {file}, which plans {value}; drop the flag or make another plan."
            )
    return {**fields, "plan": plan.to_dict()}


def _options(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--set")
    return dict(pair.split("=", 1) for pair in pairs)


def _summary(manifest: EngineManifest, output: Path, cached: bool) -> str:
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    state = "Already built" if cached else "Built"
    limits, weights = manifest.limits, manifest.quantisation.weights
    return (
        f"{state} {manifest.name} ({manifest.architecture}, {manifest.target}, weights {weights}) "
        f"in {output}: {size / 2**20:.0f} MiB, batch {limits.max_batch_size}, {limits.max_seq_len} tokens.\n"
        f"Next: llmops repo {output} -o REPO"
    )
