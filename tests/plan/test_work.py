"""The FLOPs and bytes of a step against sums over the model's shapes, and the Prometheus rules made
of them.
"""

import subprocess
from pathlib import Path

import pytest
import yaml

from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.model_lookup import look_up_model
from llmops.build.plan.speed.step_work import step_work
from llmops.build.quant_formats import FORMATS
from tests.deploy.conftest import promtool
from tests.support.commands import llmops

__all__ = ["promtool"]
RECORDING = Path(__file__).parents[2] / "deploy" / "alerts" / "recording.yaml"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
# of its config.json
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, WIDE, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
WEIGHTS = (
    LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * WIDE) + VOCABULARY * HIDDEN
)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_dense_model_reads_its_weights_once_and_its_cache(tp, batch):
    model = look_up_model(LLAMA).checkpoint.architecture
    work = step_work(model, FORMATS["none"], "bf16", ParallelLayout(tp), batch)
    # two operations for each weight and token; queries times keys, and what they weigh times values
    flops, read = work.flops, work.bytes
    assert (flops.token, flops.cached) == pytest.approx((2 * WEIGHTS, 4 * LAYERS * HEADS * DIM), rel=1e-6)
    assert flops.step == pytest.approx(0, abs=1e-6 * flops.token)
    assert (read.step, read.cached) == pytest.approx((2 * WEIGHTS, 2 * 2 * LAYERS * KV_HEADS * DIM), rel=1e-6)
    # activations: little beside the weights
    assert 0 < work.bytes.token < 0.002 * work.bytes.step


def test_fp8_reads_half():
    model = look_up_model(LLAMA).checkpoint.architecture
    kinds = (("none", "bf16"), ("fp8", "fp8"))
    plain, small = (step_work(model, FORMATS[name], kv, ParallelLayout(1), 8) for name, kv in kinds)
    head = 2 * VOCABULARY * HIDDEN
    assert small.bytes.step - head == pytest.approx((plain.bytes.step - head) / 2, rel=1e-3)
    assert small.bytes.cached == pytest.approx(plain.bytes.cached / 2, rel=1e-6)
    assert small.flops.token == pytest.approx(plain.flops.token, rel=1e-6)


def test_experts_are_read_as_far_as_a_batch_touches_them():
    model = look_up_model("mistralai/Mixtral-8x7B-Instruct-v0.1").checkpoint.architecture
    few, many = (step_work(model, FORMATS["none"], "bf16", ParallelLayout(8), batch) for batch in (1, 256))
    assert few.bytes.step < 0.5 * many.bytes.step
    # 46.7 billion parameters
    assert many.bytes.step == pytest.approx(2 * 46.7e9, rel=0.02)
    assert few.flops.token == pytest.approx(many.flops.token, rel=1e-6)


SERIES = {
    'nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="generation_requests",LABELS}': "32+0x40",
    'nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="total_context_tokens",LABELS}': "100+0x40",
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",LABELS}': "1000+0x40",
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",LABELS}': "32+0x40",
    # 15 s apart: 50 steps/s
    'nv_trt_llm_general_metrics{general_type="iteration_counter",LABELS}': "0+750x40",
}


@pytest.mark.parametrize("labels", ['instance="gpu-7:8002"', 'instance="10.0.0.7:8002",node="gpu-7"'])
def test_prometheus_makes_intensity_and_bandwidth_of_it(promtool, tmp_path, labels):
    flags = ["--gpu", "h100-sxm", "--tp", "2", "--quant", "bf16", "--kv-dtype", "bf16", "--timing", "roofline"]
    done = llmops("plan", LLAMA, *flags, "--name", "llama", "--rules", tmp_path)
    assert f"Wrote {tmp_path / 'llama.yaml'}" in done.output
    work = step_work(look_up_model(LLAMA).checkpoint.architecture, FORMATS["none"], "bf16", ParallelLayout(2), 1)
    read = 2 * WEIGHTS + work.bytes.token * 132 + 2 * 2 * LAYERS * KV_HEADS * DIM * 32_000
    computed = 2 * WEIGHTS * 132 + 4 * LAYERS * HEADS * DIM * 32_000
    expected = {
        "gpu_arithmetic_intensity": computed / read,
        # two H100 of 3.35 TB/s
        "gpu_hbm_bandwidth_utilization": 50 * read / (2 * 3.35e12),
    }
    of_engine = f'model="llama-tensorrt_llm",version="1",{labels}'
    where = '{model="llama-tensorrt_llm",node="gpu-7",source="model"}'
    once = {"eval_time": "10m", "exp_samples": [{"labels": where, "value": 1}]}
    case = {
        "interval": "15s",
        "input_series": [{"series": one.replace("LABELS", of_engine), "values": v} for one, v in SERIES.items()],
        "promql_expr_test": [
            {"expr": f"abs({name} / {value!r} - 1) < bool 1e-4", **once} for name, value in expected.items()
        ],
    }
    files = [str(RECORDING), str(tmp_path / "llama.yaml")]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": files, "tests": [case]}))
    ran = subprocess.run([*promtool, "test", "rules", str(tmp_path / "cases.yaml")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
