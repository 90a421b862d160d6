"""Bytes of weights against published checkpoints, hand figures and real exports."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.memory.weight_bytes import checkpoint_weights, rank_weights, stage_weights
from llmops.build.plan.search.plan_request import find_precision
from llmops.build.quant_formats import FORMATS, PLANNED

# `metadata.total_size` of the models' model.safetensors.index.json on the Hugging Face hub
PUBLISHED = {
    "LLAMA2_7B": 13_476_835_328,
    "LLAMA31_8B": 16_060_522_496,
    "LLAMA31_70B": 141_107_412_992,
    "LLAMA31_405B": 811_706_777_600,
    "MISTRAL_7B": 14_483_464_192,
    "MIXTRAL_8X7B": 93_405_585_408,
    "MIXTRAL_8X22B": 281_241_268_224,
    "QWEN25_7B": 15_231_233_024,
    "QWEN3_30B": 61_064_245_248,
    "GEMMA2_9B": 18_483_411_968,
    "PHI4": 29_319_014_400,
    "DEEPSEEK_V3": 688_586_727_753,
    "GPT_OSS_20B": 13_761_264_768,
}


# bytes of a checkpoint that no engine keeps: 32 layers' inverse frequencies of the rotary embedding
BESIDE = {"LLAMA2_7B": 32 * 64 * 2}


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"DEEPSEEK_V3"}))
def test_a_published_checkpoint_has_these_bytes(models, name: str):
    model = getattr(models, name)
    total = sum(checkpoint_weights(model, find_precision("auto", model)).values())
    assert total + BESIDE.get(name, 0) == PUBLISHED[name]


def test_deepseek_v3_s_checkpoint(models):
    """All but the corrections of the routers' scores and what its index counts beside the tensors."""
    weights = checkpoint_weights(models.DEEPSEEK_V3, find_precision("auto", models.DEEPSEEK_V3))
    assert sum(weights.values()) == pytest.approx(PUBLISHED["DEEPSEEK_V3"], rel=0.00002)
    # 62 layers with two norms of 7168 and those of the latents, 1536 and 512; the last norm, and three of the layer
    # that predicts the token after the next
    assert weights["norms"] == 2 * (62 * (2 * 7168 + 1536 + 512) + 7168 + 3 * 7168)


def test_70b_fp8_over_8_gpus(models):
    """9.1 GB each: 68.45e9 weights in one byte, embedding and head of 1.05e9 in two, all split over 8."""
    parts = rank_weights(models.LLAMA31_70B, FORMATS["fp8"], ParallelLayout(tp=8))
    assert sum(parts.values()) == pytest.approx(9.1e9, rel=0.005)
    assert parts["embedding"] == parts["lm_head"] == 128256 // 8 * 8192 * 2


def test_kv_heads_are_copied_when_there_are_more_ranks(models):
    one_head = models.llama(num_key_value_heads=1)
    rank = rank_weights(one_head, FORMATS["none"], ParallelLayout(8))["attention"]
    # qkv: 4 of 32 query heads and the one key and value head whole; dense: 4 heads' columns
    assert rank == 32 * 2 * 4096 * 128 * ((4 + 2) + 4)


def test_a_padded_vocabulary(models):
    odd = models.llama(vocab_size=32001)
    assert rank_weights(odd, FORMATS["none"], ParallelLayout(8))["lm_head"] == 4001 * 4096 * 2


def test_tied_embeddings_are_held_once_unless_the_ends_are_on_different_stages(models):
    tied = models.llama(tie_word_embeddings=True)
    assert "lm_head" not in rank_weights(tied, FORMATS["none"], ParallelLayout())
    assert "lm_head" in stage_weights(tied, FORMATS["none"], ParallelLayout(pp=2), 1)


def test_pipeline_remainder_goes_to_the_first_stages(models):
    """80 layers in 3 stages: 27, 27, 26; the first has the embedding too."""
    layer = stage_weights(models.LLAMA31_70B, FORMATS["none"], ParallelLayout(pp=80), 5)
    stages = [stage_weights(models.LLAMA31_70B, FORMATS["none"], ParallelLayout(pp=3), stage) for stage in range(3)]
    assert [stage["mlp"] // layer["mlp"] for stage in stages] == [27, 27, 26]
    assert rank_weights(models.LLAMA31_70B, FORMATS["none"], ParallelLayout(pp=3)) == dict(stages[0])


def test_experts_split_by_ep_or_by_tp_take_the_same_bytes(models):
    whole = rank_weights(models.MIXTRAL_8X7B, FORMATS["none"], ParallelLayout())["experts"]
    for layout in (ParallelLayout(tp=8), ParallelLayout(tp=8, ep=8), ParallelLayout(tp=8, ep=2)):
        assert rank_weights(models.MIXTRAL_8X7B, FORMATS["none"], layout)["experts"] == whole // 8


def test_awq_by_hand():
    """A 4096 x 4096 matrix: half a byte each, a 2-byte scale per 128 weights, a 2-byte factor per input."""
    expected = 4096 * 4096 // 2 + 4096 * 32 * 2 + 4096 * 2
    assert FORMATS["int4_awq"].linear_bytes(4096, 4096, "mlp", 2) == expected


@settings(max_examples=40)
@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.integers(1, 8), name=st.sampled_from(sorted(PLANNED)))
def test_ranks_together_hold_at_least_the_model(models, tp: int, pp: int, name: str):
    precision = FORMATS[name]
    whole = sum(stage_weights(models.LLAMA31_8B, precision, ParallelLayout(), 0).values())
    layout = ParallelLayout(tp, pp)
    ranks = sum(tp * sum(stage_weights(models.LLAMA31_8B, precision, layout, s).values()) for s in range(pp))
    norms = whole * 0.02
    assert whole <= ranks <= whole + norms * tp
