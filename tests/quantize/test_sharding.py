"""Tensor-parallel sizes and group sizes that a model's quantised matrices can be cut for."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.build.model.architecture import Architecture
from llmops.build.quantize.sharding import check_sharding, choose_group_size, linears, sharding_problem
from llmops.errors import InputError
from tests.plan.published_shapes import config_of, shapes_of

BASE = config_of("meta-llama/Llama-3.1-70B")
LLAMA_70B, QWEN_72B = Architecture.from_hf_config(BASE), shapes_of("Qwen/Qwen2.5-72B-Instruct")
SMOL = Architecture.from_hf_config({**BASE, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
                                    "intermediate_size": 1536, "num_hidden_layers": 30})  # fmt: skip


def test_group_sizes_of_published_models():
    assert choose_group_size(LLAMA_70B, 8, None, (128, 64)) == 128
    # 29568 / 2 = 14784 = 231 * 64
    assert choose_group_size(QWEN_72B, 2, None, (128, 64)) == 64
    assert choose_group_size(SMOL, 1, None, (128, 64)) == 64


def test_what_cannot_be_sharded_names_layer_dimension_and_tp():
    with pytest.raises(InputError) as caught:
        choose_group_size(QWEN_72B, 8, None, (128, 64))
    assert str(caught.value) == (
        "--tp 8 with group-wise quantisation cannot work: mlp.down_proj has 3696 of 29568 input features per GPU, "
        "which do not divide by group size 64; tp 1, 2 would do with group size 64."
    )
    with pytest.raises(InputError, match=r"--group-size 128 with --tp 2 .*; --group-size 64 would do with --tp 2\."):
        choose_group_size(QWEN_72B, 2, 128, (128, 64))
    with pytest.raises(InputError, match=r"--group-size 32: TensorRT-LLM has kernels for 128 and 64 only"):
        choose_group_size(LLAMA_70B, 1, 32, (128, 64))
    with pytest.raises(InputError, match=r"num_attention_heads 9 does not divide by tp 2; tp 1, 3 would do"):
        check_sharding(SMOL, 2, 1)
    with pytest.raises(InputError, match="equal stages"):
        check_sharding(LLAMA_70B, 8, 3)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([None, 32, 64, 128]), st.integers(1, 300), st.integers(1, 64))
def test_a_layout_is_refused_exactly_when_something_does_not_divide(tp, group, width, kv_heads):
    arch = dataclasses.replace(LLAMA_70B, intermediate_size=width * 32, num_kv_heads=kv_heads)
    fits = arch.num_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    for linear in linears(arch):
        cut = linear.in_features if linear.cut == "in" else linear.out_features
        fits = fits and cut % tp == 0 and (group is None or linear.local_in(tp) % group == 0)
    assert (sharding_problem(arch, tp, group) is None) == fits


GEMMA3_27B = shapes_of("google/gemma-3-27b-it")


def test_an_engine_takes_only_widths_that_its_narrow_layers_do_not_round_up():
    # 5376 = 10.5 * 4 * 128; its weights would not fit a layer of 5632
    assert choose_group_size(GEMMA3_27B, 4, None, (128, 64)) == 128
    assert choose_group_size(GEMMA3_27B, 4, None, (128, 64), rounded=True) == 64
    with pytest.raises(InputError) as caught:
        check_sharding(GEMMA3_27B, 8, 1, None, rounded=True)
    assert str(caught.value) == (
        "--tp 8 cannot work: self_attn.q_proj (in) has 5376 features, which an engine of this format needs in "
        "multiples of 512; tp 1, 2, 4 would do."
    )


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([None, 64, 128]), st.integers(1, 60), st.sampled_from([1, 2, 8]))
def test_every_width_of_an_engines_narrow_layer_is_a_multiple_of_its_unit(tp, group, hidden, kv_heads):
    arch = dataclasses.replace(LLAMA_70B, hidden_size=hidden * 64, num_kv_heads=kv_heads, num_heads=16)
    unit = (group or 64) * tp
    qkv = (16 + 2 * max(kv_heads, tp)) * arch.head_dim
    whole = all(width % unit == 0 for width in (hidden * 64, qkv, 16 * arch.head_dim, arch.intermediate_size))
    fits = whole and sharding_problem(arch, tp, group) is None
    assert (sharding_problem(arch, tp, group, rounded=True) is None) == fits
