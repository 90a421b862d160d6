"""`llmops build`: build an engine folder from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.build.target_facts import NAMES
from llmops.cli.options import ANY_PATH, FILE_PATH, option_groups, reject_options, reject_other_options
from llmops.cli.output import print_json
from llmops.cli.service.command_defaults import build_defaults
from llmops.cli.service.service_command import file_options, for_each_model, model_option
from llmops.untrusted_text import escape_unsafe

if TYPE_CHECKING:
    from llmops.build.engine_folder.manifest import EngineManifest, QualityMetrics


@option_groups(
    {
        "Input and output": ("output", "name", "described", "profile", "model", "plan_file", "adapters", "as_json"),
        "Engine": ("target", "quant", "kv_cache", "group_size", "deterministic", "options", "extra_options"),
        "Layout and limits": ("gpu", "tp", "pp", "ep", "max_batch_size", "max_seq_len", "max_num_tokens"),
        "Calibration": ("calib_dataset", "calib_size", "calib_seq_len", "calib_batch_size", "calib_seed"),
        "Quality gate": ("max_ppl_ratio", "min_top1", "max_mean_kl", "max_token_kl"),
        "Run": ("dry_run", "resume", "in_container"),
    }
)
@click.command(cls=for_each_model(build_defaults))
@click.argument("checkpoint", required=False)
@file_options
@model_option
@click.option("-o", "--output", type=ANY_PATH, help="The engine folder to make, or to replace whole.")
@click.option("--target", type=click.Choice(NAMES), default="openvino", help="Kind of engine to build.")
@click.option(
    "--quant",
    default="none",
    help="Format of the weights: none, int8 or int4 on openvino; fp8, int4_awq and others elsewhere.",
)
@click.option("--kv-cache", default="auto", help="KV cache precision.")
@click.option("--group-size", type=int, help="Number of weights that share a scale, for 4-bit formats.")
@click.option("--tp", type=click.IntRange(1), default=1, help="Tensor-parallel GPUs.")
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline-parallel GPUs.")
@click.option("--ep", type=click.IntRange(1), default=1, help="Expert-parallel GPUs; divides --tp.")
@click.option("--gpu", help="GPU the engine is for, e.g. h100-sxm.")
@click.option("--max-batch-size", type=int, help="Maximum number of requests in one batch.")
@click.option(
    "--max-seq-len",
    type=int,
    help="Prompt plus answer, in tokens.  [default: the model's context, at most 8192 of it on tensorrt and pytorch]",
)
@click.option(
    "--max-num-tokens", type=int, help="Maximum tokens in one engine step (openvino: by default measured at start)."
)
@click.option(
    "--plan",
    "plan_file",
    type=FILE_PATH,
    help="Build what `llmops plan --save FILE` planned: target, precision, layout and limits come from it.",
)
@click.option(
    "--calib-data",
    "calib_dataset",
    metavar="DATA",
    help="Text for calibration: .jsonl, .txt, .parquet or a hub id.  [default: the bundled texts]",
)
@click.option("--calib-size", type=int, help="Samples for calibration.")
@click.option("--calib-seq-len", type=int, help="Tokens per calibration sample.")
@click.option("--calib-batch-size", type=int, help="Samples calibrated at a time.")
@click.option("--calib-seed", type=int, help="Seed for drawing samples when there are more than --calib-size.")
@click.option("--max-ppl-ratio", type=float, help="Fail when quantising raises perplexity by more than this factor.")
@click.option("--min-top1", type=float, help="Fail when the most likely token stays the same less often than this.")
@click.option("--max-mean-kl", type=float, help="Fail when the mean KL divergence per token is larger (nats).")
@click.option("--max-token-kl", type=float, help="Fail when any token's KL divergence is larger (nats).")
@click.option(
    "--deterministic",
    is_flag=True,
    help="openvino: a greedy answer is the same whatever else is in the batch; float32 arithmetic, about half as fast.",
)
@click.option("--name", help="Served model name.  [default: from the checkpoint]")
@click.option("--force", is_flag=True, help="Build again, although checkpoint, options and versions are the same.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the exact commands; do nothing.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, file_okay=False),
    help="Finish an engine folder whose last step is still to run.",
)
@click.option("--in-container", is_flag=True, help="With --resume: run the step in the NVIDIA image, with docker.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="tensorrt, pytorch: a LoRA adapter (PEFT folder) to serve as model NAME beside the base model; repeatable.",
)
@click.option(
    "--set", "options", multiple=True, metavar="KEY=VALUE", help="A setting that only this target has; repeatable."
)
@click.option(
    "--extra-llm-api-options",
    "extra_options",
    type=FILE_PATH,
    help="pytorch: a YAML file of LLM-API options, as trtllm-serve takes it; flags and --set override the file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, or with --dry-run the plan, as JSON.")
def command(
    checkpoint: str | None,
    as_json: bool,
    options: tuple[str, ...],
    adapters: tuple[str, ...],
    plan_file: Path | None,
    extra_options: Path | None,
    force: bool,
    dry_run: bool,
    resume: Path | None,
    in_container: bool,
    **fields: Any,
) -> None:
    """Build an engine folder from CHECKPOINT.

    CHECKPOINT is a Hugging Face folder, a GGUF file, a hub id (owner/name, downloaded) or the
    bundled model smollm2. The same build again does nothing and takes under a second. A build that
    fails or is interrupted leaves OUTPUT as it was. Finished stages of a quantisation are kept
    beside OUTPUT for the next attempt.
    """
    from llmops.build.job.build_engine import build
    from llmops.build.spec import BuildSpec
    from llmops.cli.progress import make_progress

    if resume is not None:
        reject_other_options("--resume finishes an engine as it was begun", "resume", "in_container", "as_json")
        from llmops.build.job.resume import resume as finish

        _show(*finish(resume, in_container, make_progress()), resume, as_json)
        return
    reject_options("Only --resume runs a step in a container", "in_container")
    if checkpoint is None or fields["output"] is None:
        raise click.UsageError("There is nothing to build; give CHECKPOINT and -o OUTPUT, or --resume DIR.")
    if fields["target"] == "openvino":
        _reject_calibration()
    settings = _options(options) | _target_flags(fields)
    if adapters:
        settings["adapters"] = _options(adapters, "--adapter")
    if plan_file:
        fields |= _planned(plan_file, fields)
        settings = fields["plan"]["settings"] | settings
    if extra_options:
        from llmops.build.trtllm.extra_llm_options import read_extra_options

        more, options_of_file = read_extra_options(extra_options)
        fields |= {name: value for name, value in more.items() if not _typed(name)}
        settings = options_of_file | settings
    spec = BuildSpec(checkpoint=checkpoint, options=settings, **fields)
    if dry_run:
        from llmops.build.job.dry_run import dry_run as plan

        planned = plan(spec)
        text = json.dumps(planned._asdict(), indent=2) if as_json else planned.text()
        click.echo(escape_unsafe(text, len(text), lines=True))
        return
    _show(*build(spec, make_progress(), force), spec.output, as_json)


def _typed(name: str) -> bool:
    """Return True if this parameter was given on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _reject_calibration() -> None:
    """Raise InputError for a flag of calibration data, which target openvino does not read."""
    from llmops.errors import InputError

    for name, flag in (
        ("calib_dataset", "--calib-data"),
        ("calib_size", "--calib-size"),
        ("calib_seq_len", "--calib-seq-len"),
    ):
        if _typed(name):
            raise InputError(f"--target openvino quantises without calibration; leave out {flag}.")


def _target_flags(fields: dict[str, Any]) -> dict[str, Any]:
    from llmops.build.spec import FLAG_SETTINGS

    values = {name: fields.pop(name) for name in FLAG_SETTINGS}
    return {name: value for name, value in values.items() if value is not None}


def _show(manifest: EngineManifest, cached: bool, output: Path, as_json: bool) -> None:
    if as_json:
        print_json(manifest.model_dump(mode="json"))
    else:
        click.echo(_summary(manifest, output, cached))


def _planned(file: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the build fields that a plan sets, and the plan.

    Raises InputError if a flag contradicts the plan.
    """
    from llmops.build.plan.build_plan import BuildPlan
    from llmops.errors import InputError

    plan = BuildPlan.load(file)
    fields = {name: value for name, value in plan.build_options().items() if value is not None}
    for name, value in fields.items():
        if _typed(name) and parameters[name] != value:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} {parameters[name]} contradicts {file}, which plans {value}; leave the flag out or "
                "make another plan."
            )
    return {**fields, "plan": plan.to_dict()}


def _options(pairs: tuple[str, ...], flag: str = "--set") -> dict[str, Any]:
    for pair in pairs:
        if "=" not in pair:
            form, example = (
                ("NAME=FOLDER", f"support={pair}") if flag == "--adapter" else ("KEY=VALUE", "dtype=float16")
            )
            raise click.BadParameter(f"{pair!r} is not {form}; write for example {example}.", param_hint=flag)
    return dict(pair.split("=", 1) for pair in pairs)


def _summary(manifest: EngineManifest, output: Path, cached: bool) -> str:
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    state = "Up to date, nothing done (--force builds it again):" if cached else "Built"
    limits, weights = manifest.limits, manifest.quantisation.weights
    quality = _quality(manifest, manifest.quality) if manifest.quality is not None else ""
    shown = escape_unsafe(str(output))
    if not manifest.complete:
        return quality + _left_over(manifest, shown, size)
    return quality + (
        f"{state} {manifest.name} ({manifest.architecture}, {manifest.target}, weights {weights}) "
        f"in {shown}: {size / 2**20:.0f} MiB, batch {limits.max_batch_size}, {limits.max_seq_len} tokens.\n"
        f"Next: llmops repo {shown} -o REPO"
    )


def _quality(manifest: EngineManifest, quality: QualityMetrics) -> str:
    from llmops.build.quality.quality_gates import QualityGates
    from llmops.cli.eval import quality_lines

    return "\n".join([*quality_lines(quality, QualityGates.of_engine(manifest)), ""])


def _left_over(manifest: EngineManifest, output: str, size: int) -> str:
    gpus = manifest.parallelism.world_size
    return (
        f"Quantised {manifest.name} ({manifest.architecture}, weights {manifest.quantisation.weights}) for {gpus} "
        f"GPU{'s' if gpus > 1 else ''} in {output}: {size / 2**20:.0f} MiB.\n"
        f"trtllm-build is still to run, where the GPUs are, in {getattr(manifest.extra, 'image', '')}:\n"
        f"  llmops build --resume {output}                  inside the image\n"
        f"  llmops build --resume {output} --in-container   on a machine with docker"
    )
