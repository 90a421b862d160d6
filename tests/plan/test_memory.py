"""The bytes of one GPU add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.build.formats import FORMATS
from llmops.build.plan.gpus import find_gpu
from llmops.build.plan.memory.budget import PlannedLimits, activation_bytes, plan_memory
from llmops.build.plan.memory.kv import BLOCK_TOKENS, token_bytes
from llmops.build.plan.memory.layout import Layout

H100 = find_gpu("h100-sxm")


def used(memory) -> int:
    fixed = memory.activations + memory.cuda_graphs + memory.communication + memory.runtime
    return memory.weight_bytes + fixed + memory.kv_cache


@settings(max_examples=50, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 2048),
    tokens=st.integers(64, 32768),
    fraction=st.floats(0.1, 1.0),
    quant=st.sampled_from(["none", "fp8", "int4_awq"]),
)
def test_everything_is_counted_once(models, tp, batch, tokens, fraction, quant):
    limits = PlannedLimits(batch, tokens, 4096, fraction)
    memory = plan_memory(models.LLAMA31_8B, FORMATS[quant], "fp8", Layout(tp), H100, limits)
    assert used(memory) + memory.left == H100.memory
    assert memory.kv_cache % (BLOCK_TOKENS * token_bytes(models.LLAMA31_8B, "fp8", Layout(tp))) == 0
    assert memory.kv_cache <= (memory.kv_cache + memory.left) * fraction


def test_a_model_that_does_not_fit_says_how_much_is_missing(models):
    memory = plan_memory(models.LLAMA31_70B, FORMATS["none"], "bf16", Layout(), H100, PlannedLimits(1, 8192, 4096))
    assert not memory.fits
    assert memory.kv_cache == 0
    assert used(memory) - H100.memory == memory.short > 141e9 - H100.memory


def test_activations_of_8b_by_hand(models):
    """8192 tokens: residual and normed input in 2 bytes, gate_up's output, the activation's, the projection's."""
    per_token = 2 * 4096 * 2 + 4096 * 2 + 14336 * 2 * 2 + 14336 * 2 + 4096 * 2
    logits = 2 * 64 * 128256 * 4
    expected = 8192 * per_token + logits
    assert activation_bytes(models.LLAMA31_8B, FORMATS["none"], Layout(), PlannedLimits(64, 8192, 4096)) == expected


@pytest.mark.parametrize(
    ("name", "published"), [("h100-sxm", 80e9), ("h200-sxm", 141e9), ("a100-sxm", 80e9), ("l40s", 48e9)]
)
def test_a_gpu_has_about_its_advertised_memory(name, published):
    assert published <= find_gpu(name).memory <= 1.08 * published
