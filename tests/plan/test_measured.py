"""`plan --measured`: a host's own step times in the place of what was predicted for it."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from llmops.build.engine_folder.manifest import Parallelism
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.search.candidate import fit_layout, step_model
from llmops.build.plan.search.layout_search import search_layouts
from llmops.build.plan.search.measured_correction import measured_correction
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.speed.measured_steps import MeasuredSteps, StepTime
from llmops.build.plan.speed.step_time import Prefill
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.build.quant_formats import FORMATS
from llmops.errors import InputError

GPU = find_gpu("h100-sxm")
TIMES = RooflineTimes(GPU)


@pytest.fixture
def request_(models) -> PlanRequest:
    load = PlanWorkload(1000, 200)
    return PlanRequest("m", models.LLAMA31_70B, FORMATS["fp8"], "fp8", load, (GPU,), target="tensorrt")


def measured(request: PlanRequest, decode: float, prefill: float, **fields) -> MeasuredSteps:
    """A host of TP4 whose decode and prefill steps take these multiples of the prediction."""
    steps = step_model(request, GPU, ParallelLayout(4), TIMES)
    found = [
        StepTime(phase="decode", batch_size=b, tokens=b, context=c, seconds=decode * steps.seconds(b, c))
        for b in (1, 16, 64)
        for c in (128, 2048)
    ]
    for t in (128, 2048):
        seconds = prefill * steps.seconds(0, 0, Prefill(1, t))
        found.append(StepTime(phase="prefill", batch_size=1, tokens=t, context=0, seconds=seconds))
    of = {"device": "NVIDIA H100 80GB HBM3", "gpu": "h100-sxm", "model": "m", "architecture": "LlamaForCausalLM"}
    kind = {"target": "tensorrt", "quantisation": "fp8", "kv_cache_dtype": "fp8"}
    return MeasuredSteps(**{**of, **kind, "layout": Parallelism(tp_size=4), "steps": found, **fields})


def test_a_measured_step_takes_what_was_measured(request_):
    host = measured(request_, 1.5, 0.8)
    factors = measured_correction(host, request_, lambda layout: step_model(request_, GPU, layout, TIMES))
    steps = fit_layout(request_, GPU, ParallelLayout(4), TIMES, factors).replica.steps
    for step in host.of_phase("decode"):
        assert steps.seconds(step.batch_size, step.context) == pytest.approx(step.seconds, rel=1e-9)
    for step in host.of_phase("prefill"):
        assert steps.seconds(0, 0, Prefill(1, step.tokens)) == pytest.approx(step.seconds, rel=1e-9)


def test_a_slower_host_needs_more(request_):
    def hourly(request: PlanRequest) -> float:
        return search_layouts(request, RooflineTimes).best.cost.hourly

    loaded = replace(request_, workload=PlanWorkload(1000, 200, qps=20, ttft_p95=1.0, tpot_p95=0.05))
    slow = replace(loaded, measured=measured(loaded, 2.0, 2.0))
    assert hourly(slow) > hourly(loaded)
    label = search_layouts(slow, RooflineTimes).timing["h100-sxm"]
    assert "8 steps measured on NVIDIA H100 80GB HBM3, TP4 (decode x2.00, prefill x2.00)" in label


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpu": None, "device": "Xeon"}, r"taken on Xeon \(no GPU that plan knows\), and the plan is for h100-sxm"),
        ({"gpu": "a100-sxm"}, r"\(a100-sxm\), and the plan is for h100-sxm"),
        ({"architecture": "Qwen2ForCausalLM"}, "architecture Qwen2ForCausalLM, not LlamaForCausalLM"),
        ({"quantisation": "int4_awq"}, "weights int4_awq, not fp8"),
        ({"kv_cache_dtype": "int8"}, "KV cache int8, not fp8"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_sentence(request_, fields, words):
    with pytest.raises(InputError, match=words) as caught:
        search_layouts(replace(request_, measured=measured(request_, 1.0, 1.0, **fields)), RooflineTimes)
    assert "\n" not in caught.value.message


# -- The file of step times: written, read again, and refused with the field that is wrong


STEP = {"phase": "decode", "batch_size": 1, "tokens": 1, "context": 0, "seconds": 0.01}
FILE = {
    "device": "Xeon", "model": "m", "architecture": "LlamaForCausalLM", "target": "openvino", "quantisation": "none",
    "kv_cache_dtype": "bf16", "steps": [STEP],
}  # fmt: skip


def test_what_is_saved_is_read_again(tmp_path):
    written = MeasuredSteps(**FILE)
    written.save(tmp_path / "host.json")
    text = (tmp_path / "host.json").read_text()
    assert MeasuredSteps.load(tmp_path / "host.json") == written
    assert json.loads(text)["format"] == 1
    assert text.splitlines()[1].startswith('  "')
    assert written.layout.model_dump() == {"tp_size": 1, "pp_size": 1, "ep_size": 1}
    assert written.steps[0].samples == 1
    with pytest.raises(ValidationError):
        written.device = "another"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"format": 2}, "format"),
        ({"steps": []}, "steps"),
        ({"more": 1}, "more"),
        ({"layout": {"tp_size": 0}}, "layout.tp_size"),
        ({"layout": {"pp_size": 0}}, "layout.pp_size"),
        ({"layout": {"ep_size": 0}}, "layout.ep_size"),
        *(({"steps": [STEP, {**STEP, field: value}]}, f"steps.1.{field}") for field, value in (
            ("phase", "draft"), ("batch_size", 0), ("tokens", 0), ("context", -1), ("seconds", 0), ("samples", 0),
        )),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(tmp_path, change, where):
    path = tmp_path / "host.json"
    path.write_text(json.dumps({**FILE, **change}))
    with pytest.raises(InputError) as caught:
        MeasuredSteps.load(path)
    assert caught.value.message.startswith(f"{path} does not hold measured step times ({where}: ")
    assert caught.value.message.endswith("; measure a host with `llmops verify --calibrate host.json`.")
