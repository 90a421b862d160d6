"""Layouts that TensorRT-LLM cannot run are refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.parallel_layout import ParallelLayout, candidate_layouts, layout_problem
from llmops.build.quant_formats import FORMATS

H100 = find_gpu("h100-sxm")


@pytest.mark.parametrize(
    ("model", "quant", "gpu", "layout", "words"),
    [
        ("LLAMA31_8B", "fp8", "a100-sxm", ParallelLayout(), "fp8 needs SM89; a100-sxm is SM80"),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(tp=16), "leaves the node of 8"),
        ("QWEN25_7B", "none", "h100-sxm", ParallelLayout(tp=8), "28 attention heads do not divide by tp 8"),
        ("PHI4", "none", "h100-sxm", ParallelLayout(tp=4), "10 KV heads and tp 4"),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(pp=64), "64 stages for 32 layers"),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(tp=2, ep=2), "no experts"),
        ("MIXTRAL_8X7B", "none", "h100-sxm", ParallelLayout(tp=8, ep=3), "ep 3 does not divide tp 8"),
        # 18944 / 4 = 4736 = 37 groups of 128; 9472 / 128 = 74 fits at tp 2
        ("QWEN25_7B", "fp8_block", "h100-sxm", ParallelLayout(tp=28), "leaves the node"),
        ("DEEPSEEK_V3", "fp8_block", "h100-sxm", ParallelLayout(tp=8, ep=1), None),
        ("QWEN25_7B", "int4_awq", "h100-sxm", ParallelLayout(tp=4), None),
        ("QWEN25_7B", "int4_awq", "h100-sxm", ParallelLayout(tp=2), None),
        ("QWEN3_30B", "int4_awq", "h100-sxm", ParallelLayout(tp=4), "the expert size of a rank is 192"),
        ("LLAMA31_70B", "int4_awq", "h100-sxm", ParallelLayout(tp=8), None),
        ("LLAMA31_405B", "fp8", "h100-sxm", ParallelLayout(tp=8, pp=2), None),
        ("LLAMA31_8B", "fp8", "l40s", ParallelLayout(), None),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(pp=32), None),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(pp=33), "33 stages for 32 layers"),
        # 10 KV heads: 40 heads divide by 5 and by 8, the KV heads by 5 only
        ("PHI4", "none", "h100-sxm", ParallelLayout(tp=5), None),
        ("PHI4", "none", "h100-sxm", ParallelLayout(tp=8), "10 KV heads and tp 8: neither divides the other"),
        ("MIXTRAL_8X7B", "none", "h100-sxm", ParallelLayout(tp=8, ep=8), None),
        ("QWEN25_7B", "none", "h100-sxm", ParallelLayout(tp=7), "4 KV heads and tp 7"),
        # 2880 / 4 = 720 = 22.5 groups of 32
        ("GPT_OSS_20B", "mxfp4", "h100-sxm", ParallelLayout(tp=4), "the expert size of a rank is 720"),
        ("GPT_OSS_20B", "mxfp4", "h100-sxm", ParallelLayout(tp=2), None),
        # all experts on their ranks whole: only the attention output is cut, 4096 / 4
        ("QWEN3_30B", "int4_awq", "h100-sxm", ParallelLayout(tp=4, ep=4), None),
        # 11008 / 8 = 1376 = 10.75 groups of 128
        ("LLAMA2_7B", "int4_awq", "h100-sxm", ParallelLayout(tp=8), "intermediate_size of a rank is 1376"),
        ("LLAMA2_7B", "int4_wo", "h100-sxm", ParallelLayout(tp=8), None),
        # attention's output of a rank: 128 heads of 128 values / 8
        ("DEEPSEEK_V3", "fp8_block", "h100-sxm", ParallelLayout(tp=8, ep=8), None),
    ],
)
def test_refusals(models, model, quant, gpu, layout, words):
    reason = layout_problem(getattr(models, model), FORMATS[quant], find_gpu(gpu), layout)
    assert (reason is None) if words is None else (reason is not None and words in reason), reason


def test_the_remainder_of_the_layers(models):
    assert [ParallelLayout(pp=3).stage_layers(80, stage) for stage in range(3)] == [27, 27, 26]


def test_refusals_of_odd_sizes(models):
    odd = models.llama(intermediate_size=14337)
    assert (
        layout_problem(odd, FORMATS["none"], H100, ParallelLayout(tp=2))
        == "intermediate_size 14337 does not divide by tp 2"
    )
    assert layout_problem(odd, FORMATS["none"], H100, ParallelLayout()) is None
    experts = models.llama(architectures=["MixtralForCausalLM"], num_local_experts=6, num_experts_per_tok=2)
    assert (
        layout_problem(experts, FORMATS["none"], H100, ParallelLayout(tp=4, ep=4)) == "6 experts do not divide by ep 4"
    )
    assert layout_problem(experts, FORMATS["none"], H100, ParallelLayout(tp=4, ep=2)) is None
    narrow = models.llama(num_attention_heads=32, head_dim=24)
    words = "the attention output of a rank is 384: not a multiple of fp8_block's group of 128"
    assert layout_problem(narrow, FORMATS["fp8_block"], H100, ParallelLayout(tp=1)) is None
    assert layout_problem(narrow, FORMATS["fp8_block"], H100, ParallelLayout(tp=2)) is None
    assert layout_problem(narrow, FORMATS["fp8_block"], H100, ParallelLayout(tp=4)) == words.replace("384", "192")


def test_the_dense_mlp_counts_where_a_layer_has_one(models):
    """All layers of Qwen3 30B have experts, three of DeepSeek V3's have none."""
    without = replace(models.QWEN3_30B, intermediate_size=6145)
    assert layout_problem(without, FORMATS["none"], H100, ParallelLayout(tp=2)) is None
    some = replace(models.DEEPSEEK_V3, intermediate_size=18433)
    assert (
        layout_problem(some, FORMATS["none"], H100, ParallelLayout(tp=2))
        == "intermediate_size 18433 does not divide by tp 2"
    )
    # no MLP to quantise: 6145 is no multiple of 128, nor 14340 of 32, and MXFP4 is for experts
    assert layout_problem(without, FORMATS["int4_awq"], H100, ParallelLayout()) is None
    narrow = replace(models.LLAMA31_8B, intermediate_size=14340)
    assert layout_problem(narrow, FORMATS["mxfp4"], H100, ParallelLayout()) is None


def test_what_is_tried(models):
    dense = list(candidate_layouts(models.LLAMA31_8B, None, None, None))
    assert {(layout.tp, layout.pp) for layout in dense} == {(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8)}
    assert {layout.ep for layout in dense} == {1}
    experts = candidate_layouts(models.MIXTRAL_8X7B, 4, 2, None)
    assert list(experts) == [ParallelLayout(4, 2, 1), ParallelLayout(4, 2, 4)]
    assert list(candidate_layouts(models.MIXTRAL_8X7B, 1, 1, None)) == [ParallelLayout()]
    assert list(candidate_layouts(models.MIXTRAL_8X7B, 8, 1, 2)) == [ParallelLayout(8, 1, 2)]


def test_names_and_shares():
    assert [str(layout) for layout in (ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(tp=8, pp=2, ep=4))] == [
        "TP1",
        "TP2",
        "TP8 PP2 EP4",
    ]
    assert ParallelLayout(tp=8, pp=2, ep=4).gpus == 16
    assert ParallelLayout(tp=8, pp=2, ep=4).moe_tp == 2
