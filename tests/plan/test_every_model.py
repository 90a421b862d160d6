"""A well-known model of each architecture, on measured tables and on the roofline, with the flags that people set.

LLMOPS_EVERY_CELL=1 (`make matrix`) plans all of them.
A plan or a sentence: a traceback, a number that is none, or a reason that concerns nothing the user gave is a fault.
"""

import json
import math
import os
import re
from functools import partial

import pytest

from llmops.build.checkpoint.known_models import TABLE
from llmops.build.plan.search.layout_search import PlanResult
from llmops.cli.plan import command, make_plan
from llmops.errors import InputError, LlmopsError

ROWS = json.loads(TABLE.read_text())["models"]
if not os.environ.get("LLMOPS_EVERY_CELL"):
    ROWS = {row["config"]["architectures"][0]: row for row in ROWS}.values()
MODELS = [row["ids"][0] for row in ROWS]
FLAGS = [(), ("--quant", "fp8"), ("--gpus", "8"), ("--draft-tokens", "3"), ("--prefix-hit", "0.9"), ("--osl", "4000")]
# one layout each: all of them take minutes
LAYOUTS = [("--tp", tp, "--pp", pp) for tp, pp in ("81", "22", "44", "11")]
TARGETS = ("--ttft-p95", "500ms", "--tpot-p95", "50ms")


def planned(model: str, *flags: str) -> PlanResult:
    context = command.make_context("plan", [model, "--no-disaggregated", *flags])
    return make_plan(context.params.pop("checkpoint"), context.params)


def attempt(*arguments: str) -> tuple[PlanResult | None, str]:
    """Return the plan, or the sentence against it."""
    try:
        return planned(*arguments), ""
    except LlmopsError as error:
        return None, error.message


@pytest.mark.parametrize("timing", ["silicon", "roofline"])
def test_each_model_gets_a_plan_or_a_reason(timing):
    if timing == "silicon":
        pytest.importorskip("pyarrow")
        pytest.importorskip("aiconfigurator")
    for at, model in enumerate(MODELS):
        # each model with one combination of flags; neighbours get the others
        flags = (*FLAGS[at % len(FLAGS)], *LAYOUTS[at // 2 % len(LAYOUTS)])
        targets = TARGETS if at % 2 else ()
        plan, said = attempt(model, "--timing", timing, *flags, *targets)
        if said:
            assert "\n" not in said
            assert said.endswith(".")
            assert targets or "target" not in said.replace("--target", ""), f"{model} {flags}: {said}"
        for curve in plan.curves if plan else ():
            for point in curve.points:
                values = (point.ttft, point.ttft_p95, point.tpot, point.tpot_p95, point.rate, point.pause)
                assert all(math.isfinite(value) and value > 0 for value in values), f"{model} {flags} {curve}"
                assert 0 <= point.prefill_share < 1


def test_a_step_with_prompts_that_the_tables_have_shorter_than_one_without():
    pytest.importorskip("aiconfigurator")
    plan = planned("Qwen/Qwen3-235B-A22B", "--timing", "silicon")
    assert all(point.prefill_share >= 0 for curve in plan.curves for point in curve.points)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("deepseek-ai/DeepSeek-V3",),
            r"^deepseek-ai/DeepSeek-V3 fits on 16 x h100-sxm as TP2 PP8, but this layout cannot be built: "
            r"--pp 8 .* 61 layers into equal stages only\. TP8 EP8 on 8 x \S+ works: --gpu \S+\.$",
        ),
        (
            ("openai/gpt-oss-120b", "--quant", "fp8"),
            r"^openai/gpt-oss-120b is already quantised \(mxfp4\) and is built unchanged; leave out --quant fp8\.$",
        ),
        (
            ("meta-llama/Llama-3.3-70B-Instruct", "--gpus", "1"),
            r"^meta-llama/Llama-3.3-70B-Instruct does not fit on 1 GPU: .* each h100-sxm of 85\.5 GB would hold 141\.1 "
            r"GB of weights \(bf16\) and \d\.\d GB of buffers, 60\.\d GB too much\. .* x h100-sxm works: --gpus \d\.$",
        ),
    ],
)
def test_the_binding_constraint_is_named_with_its_numbers_and_a_choice_that_works(arguments, said):
    run = partial(planned, *arguments, "--timing", "roofline")
    with pytest.raises(InputError) as refused:
        run()
    assert re.search(said, refused.value.message)
    works = re.search(r"works: (.*)\.$", refused.value.message)
    if works:
        assert planned(arguments[0], "--timing", "roofline", *works[1].split()).best
