"""Searching layouts: targets are kept, the cheapest comes first, the others have a reason."""

from dataclasses import replace

import pytest

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.report.figures import request_summary
from llmops.build.plan.search.layout_search import PlanResult, search_layouts
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.search.plan_summary import batch_limit, build_plan
from llmops.build.plan.search.serving_cost import ApiPrice, fleet_cost
from llmops.build.plan.speed.replica_model import OperatingPoint
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.build.quant_formats import FORMATS
from llmops.errors import InputError

LOAD = PlanWorkload(2000, 300, qps=20, ttft_p95=1.0, tpot_p95=0.04)


def request(models, load=LOAD, model="LLAMA31_70B", gpus=("h100-sxm",), **fields) -> PlanRequest:
    kinds = tuple(find_gpu(name) for name in gpus)
    shapes = getattr(models, model)
    defaults = {"target": "pytorch", "precision": FORMATS["fp8"], "kv": "fp8"}
    return PlanRequest(model, shapes, workload=load, gpus=kinds, **{**defaults, **fields})


def plan(*args, **fields) -> PlanResult:
    return search_layouts(request(*args, **fields), RooflineTimes)


@pytest.fixture(scope="module")
def seventy(models) -> PlanResult:
    return plan(models)


def test_every_layout_is_ranked_or_rejected_with_a_reason(seventy):
    ranked = {candidate.name for candidate in seventy.candidates}
    rejected = {rejection.layout for rejection in seventy.rejections}
    assert len(ranked) + len(rejected) == 16
    assert not ranked & rejected
    assert all(rejection.reason and "\n" not in rejection.reason for rejection in seventy.rejections)


def test_the_targets_are_kept_at_the_rate(seventy):
    for candidate in seventy.candidates:
        for point in (candidate.point, candidate.best):
            assert point.ttft_p95 <= 1.0
            assert point.tpot_p95 <= 0.04
        assert candidate.capacity >= 20
        assert candidate.gpus <= 64
        assert candidate.point.rate * candidate.replicas == pytest.approx(20, rel=0.02)
        assert (candidate.replicas - 1) * candidate.best.rate < 20


def test_the_cheapest_comes_first(seventy):
    assert [c.cost.hourly for c in seventy.candidates] == sorted(c.cost.hourly for c in seventy.candidates)


def test_separate_workers_are_shown_beside_what_can_be_built(seventy):
    assert all(candidate.workers is None for candidate in seventy.candidates)
    other = seventy.disaggregated[0]
    workers = other.workers
    assert workers.rate >= 20
    prefill, decode = workers.prefill.layout.gpus, workers.decode.layout.gpus
    assert other.gpus == workers.prefill_count * prefill + workers.decode_count * decode
    cheaper = other.cost.hourly < seventy.best.cost.hourly
    assert seventy.cheaper_disaggregated == (other if cheaper else None)


def test_the_build_plan_is_of_the_best(seventy):
    built, best = build_plan(seventy), seventy.best
    assert (built.tp_size, built.pp_size, built.replicas) == (best.layout.tp, best.layout.pp, best.replicas)
    # what `llmops verify` holds a deployment to, alone and at the rate that was planned for
    assert built.predicted["single"]["concurrency"] == 1
    assert built.predicted["single"]["tpot"] < built.predicted["point"]["tpot"]
    assert built.predicted["point"]["concurrency"] == best.point.concurrency
    other = seventy.disaggregated[0]
    assert build_plan(seventy, other).predicted["prefill_workers"] == other.workers.prefill_count


def test_what_cannot_be_built_is_rejected_with_the_builds_own_reason(models, seventy):
    first = seventy.best.name
    refusal = {first: "no such engine"}
    found = search_layouts(request(models), RooflineTimes, refusal=lambda one: refusal.get(one.name))
    assert found.best.name != first
    assert [one.reason for one in found.rejections if one.layout == first] == ["cannot be built: no such engine"]


@pytest.mark.parametrize(
    ("quant", "kv", "target", "chunked"),
    [
        ("int4_awq", "fp8", "tensorrt", False),
        ("int8_sq", "int8", "tensorrt", False),
        ("fp8", "int8", "tensorrt", False),
        ("fp8_pc_pt", "fp8", "tensorrt", False),
        ("int4_awq", "bf16", "tensorrt", True),
        ("w4a8_awq", "fp8", "tensorrt", True),
        ("fp8", "fp8", "tensorrt", True),
        ("int4_awq", "fp8", "pytorch", True),
    ],
)
def test_engines_that_cannot_read_pages_are_planned_without_chunked_prefill(models, quant, kv, target, chunked):
    load, layout = PlanWorkload(9000, 300), {"tp": 4, "pp": 1, "precision": FORMATS[quant], "kv": kv, "target": target}
    found = plan(models, load, **layout)
    assert build_plan(found).chunked_prefill is chunked
    # a prompt of the longest sequence is taken in one step
    assert build_plan(found).max_num_tokens == (8192 if chunked else 10240)
    assert ("no chunked prefill" in request_summary(found)) is not chunked
    given = plan(models, replace(load, chunked_prefill=False), **layout)
    assert (found.best.point == given.best.point) is not chunked


def test_prices_decide_between_kinds(models):
    kinds = ("h100-sxm", "h200-sxm")
    base = request(models, gpus=kinds)
    for cheap in kinds:
        priced = tuple(gpu.at_price(0.5 if gpu.name == cheap else 50) for gpu in base.gpus)
        assert search_layouts(replace(base, gpus=priced), RooflineTimes).best.gpu.name == cheap


@pytest.mark.parametrize("change", [{"prefix_hit": 0.8}, {"tpot_p95": 0.08}, {"ttft_p95": 4.0}, {"osl": 150}])
def test_less_work_or_weaker_targets_never_cost_more(models, seventy, change):
    assert plan(models, replace(LOAD, **change)).best.cost.hourly <= seventy.best.cost.hourly


def test_the_best_batch_fits_in_the_cache(seventy):
    for candidate in seventy.candidates:
        assert 1 <= batch_limit(candidate) <= candidate.paged


def test_a_model_larger_than_the_fleet(models):
    """405.85e9 parameters: 4.2e9 of embedding and head in two bytes, the rest in one, over two GPUs."""
    said = r"does not fit on 2 GPUs: .* 205\.0 GB of weights \(fp8\).* works: --gpus 8\.$"
    with pytest.raises(InputError, match=said):
        plan(models, PlanWorkload(1000, 200), model="LLAMA31_405B", max_gpus=2)


def test_an_impossible_target_says_what_can_be_reached(models):
    with pytest.raises(InputError, match=r"the best are TTFT p95 \d+ ms and TPOT \d+\.\d ms") as caught:
        plan(models, replace(LOAD, tpot_p95=0.001))
    reachable = float(str(caught.value).split("TPOT ")[1].split(" ms")[0])
    plan(models, replace(LOAD, qps=0.01, tpot_p95=reachable / 1e3 * 1.05))


def test_too_few_gpus_for_the_rate(models):
    with pytest.raises(InputError, match=r"20 requests/s need at least (\d+) GPUs, and --gpus is 4") as caught:
        plan(models, max_gpus=4)
    need = int(str(caught.value).split("at least ")[1].split(" ")[0])
    assert plan(models, max_gpus=need).best.gpus <= need


def test_a_gpu_that_cannot_run_the_precision(models):
    with pytest.raises(InputError, match="fp8 needs SM89; a100-sxm is SM80"):
        plan(models, gpus=("a100-sxm",))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 8, "pp": 2, "max_gpus": 8}, "--tp 8 x --pp 2 needs 16 GPUs, but --gpus is 8"),
        ({"ep": 2}, "a dense model, which has no experts"),
        ({"tp": 0}, "--tp 0 is too small"),
        ({"max_seq_len": 2000}, "is 2300 tokens, more than --max-seq-len 2000"),
        ({"max_seq_len": 200_000}, "more than the 131072 positions"),
        ({"load": PlanWorkload(131_000, 1000)}, "132000 tokens, more than the 131072 positions"),
        ({"max_num_tokens": 1000, "load": PlanWorkload(2000, 300, chunked_prefill=False)}, "without chunked prefill"),
        # 1.2.1 cpp/tensorrt_llm/executor/kvCacheConfig.cpp: TLLM_CHECK(freeGpuMemoryFraction < 1.F)
        ({"kv_fraction": 1.0}, "--kv-fraction 1"),
        ({"model": "DEEPSEEK_V3", "target": "tensorrt"}, "--target tensorrt; give --target pytorch"),
        ({"precision": FORMATS["int8_sq"]}, "--quant int8_sq runs on --target tensorrt only"),
        ({"precision": FORMATS["fp8_block"], "target": "tensorrt"}, "--quant fp8_block runs on --target pytorch only"),
        ({"model": "MIXTRAL_8X7B", "tp": 4, "ep": 4, "target": "tensorrt"}, "--ep 4 runs on --target pytorch only"),
        (
            {"precision": FORMATS["int4_awq"], "target": "tensorrt", "load": PlanWorkload(2000, 300, prefix_hit=0.5)},
            "--prefix-hit: an engine of int4_awq weights with an fp8 KV cache does not reuse prefixes",
        ),
        (
            {"precision": FORMATS["int4_awq"], "target": "tensorrt", "max_num_tokens": 1000},
            "cannot hold a prompt of 2000 tokens without chunked prefill; raise it.",
        ),
        ({"kv": "int8"}, "--kv-dtype int8 runs on --target tensorrt only"),
        ({"model": "MIXTRAL_8X7B", "tp": 4, "ep": 3}, "--ep 3 must divide --tp 4"),
    ],
)
def test_contradictions(models, fields, words):
    with pytest.raises(InputError) as caught:
        request(models, **fields)
    assert words in str(caught.value)


# -- Money by hand


POINT = OperatingPoint(10, 2.0, 0.1, 0.2, 0.02, 0.03, prefill_share=0.25, tokens_per_second=400, gpus=4)


def test_a_fleet_of_8_at_2_dollars():
    """$16/h; 2 requests/s are 7.2 M input and 1.44 M output tokens an hour; a quarter of the time goes to prompts."""
    cost = fleet_cost(2.0, 8, 2.0, 4.0, POINT, PlanWorkload(1000, 200), None)
    assert (cost.hourly, cost.input_per_million) == (16, pytest.approx(16 * 0.25 / 7.2))
    assert cost.output_per_million == pytest.approx(16 * 0.75 / 1.44)
    # 7200 requests an hour
    assert cost.request == pytest.approx(16 / 7200)
    spent = 7.2 * cost.input_per_million + 1.44 * cost.output_per_million
    assert spent == pytest.approx(16)


def test_break_even():
    """A request costs 1000 x $1 + 200 x $5 per million = $0.002; $16/h buy 8000 of them, 2.22 a second."""
    cost = fleet_cost(2.0, 8, 2.0, 4.0, POINT, PlanWorkload(1000, 200), ApiPrice(1.0, 5.0))
    even = (pytest.approx(8000 / 3600), pytest.approx(8000 * 24 * 1200))
    assert (cost.break_even_rate, cost.break_even_tokens_per_day) == even


def test_a_fleet_that_breaks_even_at_full_load():
    """$16/h against $0.008 a request: 2000 requests an hour, which is all that this fleet can do."""
    cost = fleet_cost(2.0, 8, 0.5, 2000 / 3600, POINT, PlanWorkload(1000, 200), ApiPrice(4.0, 20.0))
    assert cost.break_even_rate == pytest.approx(2000 / 3600)


# -- Workloads computed by hand, and inputs that are rejected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"isl": 0}, "--isl 0 is too short"),
        ({"osl": 0}, "--osl 0 is too short"),
        ({"prefix_hit": 1.0}, "--prefix-hit 1 is not possible"),
        ({"prefix_hit": -0.1}, "--prefix-hit -0.1 is not possible"),
        ({"acceptance": 1.0}, "--acceptance 1 is not possible"),
        ({"acceptance": -0.5}, "--acceptance -0.5 is not possible"),
        ({"qps": 0.0}, "--qps 0 is not possible"),
        ({"qps": -1.0}, "--qps -1 is not possible"),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(InputError) as caught:
        PlanWorkload(**fields)
    assert words in caught.value.message


def test_what_is_planned_for_when_nothing_is_said():
    """docs/plan.md: prompts of 1000 tokens, answers of 200, no cache, no drafts, chunked prefill."""
    load = PlanWorkload()
    assert (load.isl, load.osl, load.new_tokens, load.tokens_per_step) == (1000, 200, 1000, 1.0)
    assert load.chunked_prefill
    assert PlanWorkload(draft_tokens=1).tokens_per_step == pytest.approx(1.7)
