"""Times of operations: bounds of the data sheet, order, and the measured tables."""

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.speed.step_time import Prefill, StepModel
from llmops.build.plan.timing.interpolation import InterpolationGrid
from llmops.build.plan.timing.operation_times import AttentionShape, ExpertsShape
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.build.plan.timing.silicon import package_root, table_folder, timing_source
from llmops.build.quant_formats import FORMATS
from llmops.errors import InputError

H100 = find_gpu("h100-sxm")
known_times = lru_cache(lambda source: timing_source(H100, source))
HEADS = AttentionShape(32, 8, 128)
needs_tables = pytest.mark.skipif(package_root() is None, reason="the silicon extra is not installed")
SOURCES = ["roofline", pytest.param("silicon", marks=needs_tables)]


def test_7b_in_fp16_takes_at_least_4_2_ms_per_token():
    """7e9 weights of 2 bytes over 3.35 TB/s."""
    bound = RooflineTimes(H100).ideal(2 * 7e9, 2 * 7e9, "bf16")
    assert bound == pytest.approx(4.2e-3, rel=0.01)


@pytest.mark.parametrize("source", SOURCES)
def test_one_sequence_of_llama2_7b_decodes_near_the_bound(models, source):
    steps = StepModel(models.LLAMA2_7B, FORMATS["none"], "bf16", ParallelLayout(), known_times(source))
    bound = 13_476_835_328 / H100.bandwidth
    assert bound < steps.seconds(1, 128) < 2 * bound


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=40)
@given(
    m=st.integers(1, 8192),
    n=st.sampled_from([1024, 4608, 28672]),
    k=st.sampled_from([2048, 8192]),
    quant=st.sampled_from(["none", "fp8"]),
)
def test_no_matrix_product_beats_the_data_sheet(source, m, n, k, quant):
    kind = FORMATS[quant]
    arithmetic = 2 * m * n * k / H100.flops(kind.compute)
    weights = n * k * kind.bits / 8 / H100.bandwidth
    assert known_times(source).gemm(m, n, k, quant) >= max(arithmetic, weights)


@pytest.mark.parametrize("source", SOURCES)
def test_more_work_takes_longer(models, source):
    steps = StepModel(models.LLAMA31_8B, FORMATS["fp8"], "fp8", ParallelLayout(), known_times(source))
    batches = [steps.seconds(batch, 1000) for batch in (1, 16, 64, 256, 1024)]
    lengths = [steps.seconds(64, length) for length in (128, 1000, 8000, 32000)]
    prompts = [steps.seconds(64, 1000, Prefill(1, tokens)) for tokens in (1, 128, 1000, 8000)]
    drafts = [steps.seconds(64, 1000, None, count) for count in (0, 1, 3, 7)]
    for series in (batches, lengths, prompts, drafts):
        assert series == sorted(series)
    assert steps.seconds(0, 0, Prefill(1, 500, 4500)) < steps.seconds(0, 0, Prefill(1, 5000))


def test_grid_interpolates_between_and_holds_beyond():
    grid = InterpolationGrid({(1, 10): 1.0, (4, 10): 4.0, (1, 1000): 10.0, (4, 1000): 40.0})
    assert (grid.at(2, 10), grid.at(2, 100)) == (pytest.approx(2.0), pytest.approx(2 * 10**0.5))
    assert grid.at(100, 10) == grid.at(4, 10) == pytest.approx(4.0)


@needs_tables
def test_a_measured_point_gives_the_measured_time():
    """Against the table itself: bf16 4096 x 4096, and attention of 32 heads on 8."""
    folder, times = table_folder(H100), timing_source(H100, "silicon")
    square = [("gemm_dtype", "==", "bfloat16"), ("n", "==", 4096), ("k", "==", 4096), ("m", "in", [16, 256, 4096])]
    gemm = parquet.read_table(folder / "gemm_perf.parquet", filters=square).to_pylist()
    assert len(gemm) == 3
    for row in gemm:
        assert times.gemm(row["m"], 4096, 4096, "none") == pytest.approx(row["latency"] / 1e3, rel=1e-6)
    heads = [("num_heads", "==", 32), ("num_key_value_heads", "==", 8), ("head_dim", "==", 128)]
    sizes = [("window_size", "==", 0), ("batch_size", "==", 8), ("step", "==", 2047)]
    filters = [*heads, *sizes, ("kv_cache_dtype", "==", "bfloat16")]
    decode = parquet.read_table(folder / "generation_attention_perf.parquet", filters=filters).to_pylist()
    assert times.decode(8, 2048, HEADS) == pytest.approx(decode[0]["latency"] / 1e3, rel=1e-6)


@needs_tables
def test_experts_without_a_gate_take_their_measured_time():
    """Nemotron 3 Super's, two matrices of 4096 x 2688, which AIConfigurator's collector/trtllm/collect_moe.py marks
    "moe_torch_flow_nongated"; the planner asks for them as gated ones of two thirds of the width.
    """
    folder, times = table_folder(H100), timing_source(H100, "silicon")
    kind = [("kernel_source", "==", "moe_torch_flow_nongated"), ("moe_dtype", "==", "fp8"), ("hidden_size", "==", 4096)]
    split = [("moe_tp_size", "==", 1), ("moe_ep_size", "==", 8), ("distribution", "==", "power_law_1.2")]
    rows = parquet.read_table(folder / "moe_perf.parquet", filters=[*kind, *split]).to_pylist()
    found = {row["num_tokens"]: row["latency"] / 1e3 for row in rows}
    for tokens in (1, 16, 4096):
        experts = ExpertsShape(4096, 2688 * 2 // 3, 22, 512, tp=1, ep=8)
        assert times.moe(tokens, experts, "fp8") == pytest.approx(found[tokens], rel=1e-6)


@needs_tables
def test_what_was_not_measured_comes_from_the_roofline_and_is_named(models):
    times = timing_source(H100, "silicon")
    assert times.gemm(16, 4096, 4096, "int4_awq") == RooflineTimes(H100).gemm(16, 4096, 4096, "int4_awq")
    assert times.missing == {"int4_awq gemm"}


def test_a_gpu_without_tables_gets_the_roofline_and_says_so():
    times = timing_source(find_gpu("l4"))
    assert times.label == "roofline (l4)"
    if package_root():
        said = r"cannot plan for l4: AIConfigurator .* has no TensorRT-LLM tables for l4"
        with pytest.raises(InputError, match=said):
            timing_source(find_gpu("l4"), "silicon")
