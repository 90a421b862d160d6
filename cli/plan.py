"""`llmops plan`: plan the memory, the layout, the speed and the cost of a deployment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmops.build.plan.speed.workload import TARGET_LATENCIES, PlanWorkload
from llmops.build.quant_formats import PLANNED
from llmops.build.target_facts import GPU_TARGETS
from llmops.cli.options import EXISTING_FOLDER, FILE_PATH, Duration, OutputFile, Share, option_groups, reject_options
from llmops.cli.output import console, print_line, table_console
from llmops.cli.service.command_defaults import plan_defaults
from llmops.cli.service.service_command import file_options, for_each_model, model_option
from llmops.errors import InputError

if TYPE_CHECKING:
    from llmops.build.checkpoint import Checkpoint
    from llmops.build.plan.gpu_specs import GpuSpec
    from llmops.build.plan.search.candidate import Candidate
    from llmops.build.plan.search.layout_search import PlanResult
    from llmops.build.plan.search.plan_request import PlanRequest
    from llmops.build.plan.search.serving_cost import ApiPrice


T = TypeVar("T")

PIPED_WIDTH = 120
QUANT = ", ".join(form.label for form in PLANNED.values())


def _latency_options(metric: str, text: str, example: str) -> Callable[[T], T]:
    """Return a decorator that adds options for the targets of a latency at three percentiles."""
    texts = {
        95: f"Target for the {text}, 95th percentile, e.g. {example}.",
        50: "The same target for the median.",
        99: "The same target for the 99th percentile.",
    }

    def add(command: T) -> T:
        for percentile, help_ in reversed(texts.items()):
            command = click.option(f"--{metric}-p{percentile}", type=Duration(), help=help_)(command)  # type: ignore[type-var]
        return command

    return add


@option_groups(
    {
        "Model and GPUs": (
            "gpu",
            "compare",
            "max_gpus",
            "quant",
            "kv_dtype",
            "target",
            "described",
            "profile",
            "model",
        ),
        "Load and objectives": ("isl", "osl", "qps", *TARGET_LATENCIES, "availability", "prefix_hit"),
        "Layout and limits": ("tp", "pp", "ep", "max_seq_len", "max_num_tokens", "kv_fraction"),
        "Engine": ("draft_tokens", "acceptance", "chunked_prefill", "disaggregated"),
        "Cost and times": ("price", "api_price", "measured", "timing", "online"),
        "Report": ("as_json", "html", "save", "rules", "name"),
    }
)
@click.command(name="plan", cls=for_each_model(plan_defaults))
@click.argument("checkpoint")
@file_options
@model_option
@click.option("--gpu", help="GPU model.  [default: h100-sxm]")
@click.option("--compare", metavar="GPU,GPU…", help="Compare several GPU models by cost.")
@click.option("--gpus", "max_gpus", type=click.IntRange(1), default=64, help="Number of GPUs available.")
@click.option("--quant", default="auto", help=f"Weights: {QUANT}.")
@click.option("--kv-dtype", default="auto", help="KV cache: bf16, fp8, int8; auto follows the weights.")
@click.option(
    "--target", type=click.Choice(GPU_TARGETS), help="Kind of engine.  [default: tensorrt if it supports the model]"
)
@click.option("--isl", type=click.IntRange(1), default=1000, help="Mean prompt length in tokens.")
@click.option("--osl", type=click.IntRange(1), default=200, help="Mean answer length in tokens.")
@click.option(
    "--qps",
    type=click.FloatRange(0, min_open=True),
    help="Requests/s to serve.  [default: the capacity of one replica]",
)
@_latency_options("ttft", "time to first token", "500ms")
@_latency_options("tpot", "time per output token", "50ms")
@_latency_options("e2e", "time to the last token of an answer of mean length", "20s")
@click.option(
    "--availability",
    type=Share(),
    help="Target for the share of the time in which enough replicas run, e.g. 99.9%; adds spare replicas.",
)
@click.option("--tp", type=click.IntRange(1), help="Fix the tensor parallel size.")
@click.option("--pp", type=click.IntRange(1), help="Fix the number of pipeline stages.")
@click.option("--ep", type=click.IntRange(1), help="Fix the expert parallel size, a divisor of --tp.")
@click.option(
    "--max-seq-len", type=click.IntRange(1), help="Longest sequence to build for.  [default: isl + osl, rounded up]"
)
@click.option("--max-num-tokens", type=click.IntRange(1), help="Maximum tokens of one step.  [default: 8192]")
@click.option(
    "--kv-fraction",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.9,
    help="Share of the free memory for the KV cache.",
)
@click.option(
    "--prefix-hit",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Share of prompt tokens found in the prefix cache.",
)
@click.option(
    "--draft-tokens", type=click.IntRange(0), default=0, help="Speculative decoding: tokens proposed per step."
)
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    default=0.7,
    help="Speculative decoding: probability that a proposed token is accepted.",
)
@click.option("--chunked-prefill/--no-chunked-prefill", default=True, help="Split long prompts over steps.")
@click.option("--disaggregated/--no-disaggregated", default=True, help="Also show prefill and decode on separate GPUs.")
@click.option("--price", multiple=True, metavar="GPU=$/H", help="Price of a GPU-hour; repeat or separate by commas.")
@click.option(
    "--api-price", metavar="IN,OUT", help="An API's $ per million input and output tokens, for the break-even."
)
@click.option(
    "--measured",
    type=FILE_PATH,
    help="Correct the times by what `llmops verify --calibrate FILE` measured on your host.",
)
@click.option("--timing", default="auto", help="Source of the times: auto, silicon (measured tables) or roofline.")
@click.option("--online", is_flag=True, help="Ask the Hugging Face hub for the config, also of a well-known model.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--html", type=OutputFile(), help="Write a report to this file.")
@click.option("--save", type=OutputFile(), help="Write the build plan for `llmops build --plan`.")
@click.option(
    "--rules",
    type=EXISTING_FOLDER,
    metavar="FOLDER",
    help="Write NAME.yaml into this folder: Prometheus' rules for intensity and bandwidth without DCGM.",
)
@click.option("--name", help="With --rules: served name of the model.  [default: from the checkpoint]")
def command(
    checkpoint: str,
    as_json: bool,
    html: Path | None,
    save: Path | None,
    rules: Path | None,
    name: str | None,
    **flags: Any,
) -> None:
    """Plan a deployment: does it fit, how to shard it, how fast it is, what it costs.

    CHECKPOINT is what `llmops build` takes, or only its config.json. Neither a GPU nor weights are
    needed.
    """
    if rules is None:
        reject_options("Only --rules writes a name", "name")
    if not flags["draft_tokens"]:
        reject_options("Without --draft-tokens no token is proposed", "acceptance")
    plan = make_plan(checkpoint, flags)
    if save:
        from llmops.build.plan.search.plan_summary import build_plan

        build_plan(plan).save(save)
    written = _write_rules(plan, rules, name or _named(checkpoint)) if rules else None
    if html:
        from llmops.build.plan.report.html_report import render_page
        from llmops.output_files import write_text

        write_text(html, render_page(plan))
    if as_json:
        import json

        from llmops.build.plan.search.plan_summary import plan_data

        click.echo(json.dumps(plan_data(plan), indent=2))
        return
    from llmops.build.plan.report.terminal_report import print_plan

    print_plan(plan, table_console(PIPED_WIDTH))
    if save:
        chosen = plan.best
        print_line(f"Wrote {save}: {chosen.replicas}x {chosen.name} on {chosen.gpus} x {chosen.gpu.name}")
    for path in (html, written):
        if path:
            print_line(f"Wrote {path}")


def _named(checkpoint: str) -> str:
    from llmops.cli.service.template import default_model_name

    return default_model_name(checkpoint)


def _write_rules(plan: PlanResult, folder: Path, name: str) -> Path:
    from llmops.build.plan.report.recording_rules import render_rules
    from llmops.output_files import write_text
    from llmops.yaml_files import write_yaml

    path = folder / f"{name}.yaml"
    write_text(path, write_yaml(render_rules(plan, name), width=200))
    return path


def make_plan(source: str, flags: dict[str, Any]) -> PlanResult:
    from llmops.build.job.dry_run import build_problem
    from llmops.build.plan.model_lookup import look_up_model
    from llmops.build.plan.search.layout_search import search_layouts
    from llmops.build.plan.search.plan_summary import engine_plan
    from llmops.build.plan.timing.silicon import timing_source

    name, checkpoint = look_up_model(source, flags["online"])
    request = _request(name, checkpoint, flags)

    def refused(candidate: Candidate) -> str | None:
        return build_problem(checkpoint, engine_plan(request, candidate))

    with console(stderr=True).status("planning …") as status:
        return search_layouts(
            request,
            lambda gpu: timing_source(gpu, flags["timing"]),
            lambda what: status.update(f"planning … {what}"),
            refused,
        )


def _request(name: str, checkpoint: Checkpoint, flags: dict[str, Any]) -> PlanRequest:
    from llmops.build.job.dry_run import gpu_target
    from llmops.build.plan.memory.kv_sizes import find_kv
    from llmops.build.plan.search.plan_request import PlanRequest, find_precision
    from llmops.build.plan.speed.measured_steps import MeasuredSteps

    model = checkpoint.architecture
    precision = find_precision(flags["quant"], model)
    kv = find_kv(flags["kv_dtype"], precision)
    load = (
        *("isl", "osl", "qps", *TARGET_LATENCIES, "availability", "prefix_hit"),
        *("draft_tokens", "acceptance", "chunked_prefill"),
    )
    same = ("max_gpus", "tp", "pp", "ep", "max_seq_len", "max_num_tokens", "kv_fraction", "disaggregated")
    return PlanRequest(
        name=name,
        model=model,
        precision=precision,
        kv=kv,
        workload=PlanWorkload(**{name: flags[name] for name in load}),
        gpus=_gpus(flags["gpu"], flags["compare"], flags["price"]),
        target=flags["target"] or gpu_target(checkpoint, precision, kv, flags["ep"] or 1),
        api=_api(flags["api_price"]),
        measured=MeasuredSteps.load(flags["measured"]) if flags["measured"] else None,
        **{name: flags[name] for name in same},
    )


def _gpus(gpu: str | None, compare: str | None, prices: tuple[str, ...]) -> tuple[GpuSpec, ...]:
    from llmops.build.plan.gpu_specs import find_gpu

    if gpu and compare:
        raise InputError("--gpu and --compare exclude each other; name every kind of GPU in --compare.")
    names = [name for name in (compare or gpu or "h100-sxm").split(",") if name.strip()]
    kinds = {found.name: found for found in map(find_gpu, names)}
    for item in ",".join(prices).split(",") if prices else []:
        name, equals, amount = item.partition("=")
        if not equals:
            raise InputError(f"--price {item}: write GPU=DOLLARS, the price of an hour, e.g. {next(iter(kinds))}=2.5.")
        kind = find_gpu(name).name
        if kind not in kinds:
            raise InputError(f"--price {item}: the plan does not use {kind}; add it to --gpu or --compare.")
        try:
            price = float(amount)
        except ValueError:
            price = 0.0
        if not 0 < price < float("inf"):
            raise InputError(f"--price {item}: write the dollars per hour of one GPU, e.g. {kind}=2.5.")
        kinds[kind] = kinds[kind].at_price(price)
    return tuple(kinds.values())


def _api(price: str | None) -> ApiPrice | None:
    from llmops.build.plan.search.serving_cost import ApiPrice

    if price is None:
        return None
    try:
        into, out = (float(part) for part in price.split(","))
    except ValueError:
        raise InputError(f"--api-price {price}: write $ per million input and output tokens, e.g. 0.6,2.4.") from None
    if into < 0 or out < 0 or into + out == 0:
        raise InputError(f"--api-price {price}: prices must not be negative, and not both zero.")
    return ApiPrice(into, out)
