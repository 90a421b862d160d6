"""Layouts that TensorRT-LLM cannot run are refused with the reason."""

from __future__ import annotations

import pytest

from llmops.build.formats import FORMATS
from llmops.build.plan.gpus import find_gpu
from llmops.build.plan.memory.layout import Layout, refusal

H100 = find_gpu("h100-sxm")


@pytest.mark.parametrize(
    ("model", "quant", "gpu", "layout", "words"),
    [
        ("LLAMA31_8B", "fp8", "a100-sxm", Layout(), "fp8 needs SM89; a100-sxm is SM80"),
        ("LLAMA31_8B", "none", "h100-sxm", Layout(tp=16), "leaves the node of 8"),
        ("QWEN25_7B", "none", "h100-sxm", Layout(tp=8), "28 attention heads do not divide by tp 8"),
        ("PHI4", "none", "h100-sxm", Layout(tp=4), "10 KV heads and tp 4"),
        ("LLAMA31_8B", "none", "h100-sxm", Layout(pp=64), "64 stages for 32 layers"),
        ("LLAMA31_8B", "none", "h100-sxm", Layout(tp=2, ep=2), "no experts"),
        ("MIXTRAL_8X7B", "none", "h100-sxm", Layout(tp=8, ep=3), "ep 3 does not divide tp 8"),
        # 18944 / 4 = 4736 = 37 groups of 128; 9472 / 128 = 74 fits at tp 2
        ("QWEN25_7B", "fp8_block", "h100-sxm", Layout(tp=28), "leaves the node"),
        ("DEEPSEEK_V3", "fp8_block", "h100-sxm", Layout(tp=8, ep=1), None),
        ("QWEN25_7B", "int4_awq", "h100-sxm", Layout(tp=4), None),
        ("QWEN25_7B", "int4_awq", "h100-sxm", Layout(tp=2), None),
        ("QWEN3_30B", "int4_awq", "h100-sxm", Layout(tp=4), "the expert size of a rank is 192"),
        ("LLAMA31_70B", "int4_awq", "h100-sxm", Layout(tp=8), None),
        ("LLAMA31_405B", "fp8", "h100-sxm", Layout(tp=8, pp=2), None),
    ],
)
def test_refusals(models, model, quant, gpu, layout, words):
    reason = refusal(getattr(models, model), FORMATS[quant], find_gpu(gpu), layout)
    assert (reason is None) if words is None else (reason is not None and words in reason), reason


def test_the_remainder_of_the_layers(models):
    assert [Layout(pp=3).stage_layers(80, stage) for stage in range(3)] == [27, 27, 26]
