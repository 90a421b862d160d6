"""Times of operations: bounds of the data sheet, order, and the measured tables."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.speed.step_time import Prefill, StepModel
from llmops.build.plan.timing.interpolation import InterpolationGrid
from llmops.build.plan.timing.operation_times import AttentionShape, ExpertsShape
from llmops.build.plan.timing.roofline import RooflineTimes, prefill_work
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


def test_few_tokens_touch_few_experts():
    """One token of Mixtral reads 2 of 8 experts, 64 tokens all of them."""
    times, layer = RooflineTimes(H100), ExpertsShape(4096, 14336, 2, 8, 1, 1)
    expert = 3 * 4096 * 14336 * 2 / (H100.bandwidth * 0.75)
    assert times.moe(1, layer, "none") == pytest.approx(2 * expert, rel=0.03)
    assert times.moe(64, layer, "none") == pytest.approx(8 * expert, rel=0.03)


def test_grid_interpolates_between_and_holds_beyond():
    grid = InterpolationGrid({(1, 10): 1.0, (4, 10): 4.0, (1, 1000): 10.0, (4, 1000): 40.0})
    assert grid.at(2, 10) == pytest.approx(2.0)
    assert grid.at(2, 100) == pytest.approx(2 * 10**0.5)
    assert grid.at(100, 10) == grid.at(4, 10) == pytest.approx(4.0)


def test_grid_takes_the_nearest_where_nothing_was_measured():
    grid = InterpolationGrid({(1, 1): 5.0, (8, 8): 7.0})
    assert grid.at(8, 1) in (pytest.approx(5.0), pytest.approx(7.0))


@needs_tables
def test_a_measured_point_gives_the_measured_time():
    """Against the table itself: bf16 4096 x 4096, and attention of 32 heads on 8."""
    from pyarrow import parquet

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
def test_a_cache_is_never_read_faster_than_hbm_streams():
    """A large batch's cache, against the best that the tables show for large weights."""
    times = timing_source(H100, "silicon")
    for batch, length in ((256, 2000), (64, 20000), (512, 1000)):
        read = batch * length * 2 * 8 * 128 * 2 / H100.bandwidth
        assert times.decode(batch, length, HEADS) >= read / 0.85


@given(tokens=st.integers(1, 60), prefix=st.integers(0, 60), window=st.integers(1, 50))
def test_a_token_sees_no_more_than_its_window(tokens, prefix, window):
    """Against counting, one token at a time."""
    heads = AttentionShape(1, 1, 1, window=window)
    pairs = sum(min(prefix + place + 1, window) for place in range(tokens))
    assert prefill_work(1, tokens, prefix, heads)[0] == 4 * pairs
    full = AttentionShape(1, 1, 1)
    assert prefill_work(1, tokens, prefix, full)[0] == 4 * sum(prefix + place + 1 for place in range(tokens))


class Recorded(RooflineTimes):
    """The roofline, and the rows of each matrix product."""

    def __init__(self) -> None:
        super().__init__(H100)
        self.rows: set[int] = set()

    def gemm(self, m, n, k, precision):
        self.rows.add(m)
        return super().gemm(m, n, k, precision)


def test_a_step_without_prompts_runs_as_the_next_captured_graph(models):
    def rows(batch: int, prefill: Prefill | None = None) -> set[int]:
        times = Recorded()
        model = StepModel(models.LLAMA31_8B, FORMATS["fp8"], "fp8", ParallelLayout(), times, graphs=(256, 384))
        model.seconds(batch, 1000, prefill)
        return times.rows

    # the output head takes the sequences that are there
    assert rows(300) == {384, 300}
    assert rows(384) == {384}
    assert rows(500) == {500}
    assert rows(300, Prefill(1, 100)) == {400, 301}


@needs_tables
def test_what_was_not_measured_comes_from_the_roofline_and_is_named(models):
    times = timing_source(H100, "silicon")
    assert times.gemm(16, 4096, 4096, "int4_awq") == RooflineTimes(H100).gemm(16, 4096, 4096, "int4_awq")
    assert times.missing == {"int4_awq gemm"}


def test_a_gpu_without_tables_gets_the_roofline_and_says_so():
    times = timing_source(find_gpu("l4"))
    assert times.label == "roofline (l4)"
    if package_root():
        with pytest.raises(
            InputError, match=r"cannot plan for l4: AIConfigurator .* has no TensorRT-LLM tables for it"
        ):
            timing_source(find_gpu("l4"), "silicon")
