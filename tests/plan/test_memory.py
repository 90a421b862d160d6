"""The bytes of one GPU add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.kv_sizes import BLOCK_TOKENS, token_bytes
from llmops.build.plan.memory.memory_budget import (
    PlannedLimits,
    activation_bytes,
    communication_bytes,
    graph_bytes,
    graph_sizes,
    plan_memory,
)
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.quant_formats import FORMATS

H100 = find_gpu("h100-sxm")


def used(memory) -> int:
    fixed = memory.activations + memory.cuda_graphs + memory.communication + memory.runtime
    return memory.weight_bytes + fixed + memory.kv_cache


@settings(max_examples=50)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 2048),
    tokens=st.integers(64, 32768),
    fraction=st.floats(0.1, 1.0),
    quant=st.sampled_from(["none", "fp8", "int4_awq"]),
)
def test_everything_is_counted_once(models, tp, batch, tokens, fraction, quant):
    limits = PlannedLimits(batch, tokens, 4096, fraction)
    memory = plan_memory(models.LLAMA31_8B, FORMATS[quant], "fp8", ParallelLayout(tp), H100, limits)
    assert used(memory) + memory.left == H100.memory
    assert memory.kv_cache % (BLOCK_TOKENS * token_bytes(models.LLAMA31_8B, "fp8", ParallelLayout(tp))) == 0
    assert memory.kv_cache <= (memory.kv_cache + memory.left) * fraction


def test_a_model_that_does_not_fit_says_how_much_is_missing(models):
    memory = plan_memory(
        models.LLAMA31_70B, FORMATS["none"], "bf16", ParallelLayout(), H100, PlannedLimits(1, 8192, 4096)
    )
    assert not memory.fits
    assert memory.kv_cache == 0
    assert used(memory) - H100.memory == memory.short > 141e9 - H100.memory


def test_activations_of_8b_by_hand(models):
    """8192 tokens: residual and normed input in 2 bytes, gate_up's output, the activation's, the projection's."""
    per_token = 2 * 4096 * 2 + 4096 * 2 + 14336 * 2 * 2 + 14336 * 2 + 4096 * 2
    logits = 2 * 64 * 128256 * 4
    expected = 8192 * per_token + logits
    assert (
        activation_bytes(models.LLAMA31_8B, FORMATS["none"], ParallelLayout(), PlannedLimits(64, 8192, 4096))
        == expected
    )


@pytest.mark.parametrize(
    ("name", "published"), [("h100-sxm", 80e9), ("h200-sxm", 141e9), ("a100-sxm", 80e9), ("l40s", 48e9)]
)
def test_a_gpu_has_about_its_advertised_memory(name, published):
    assert published <= find_gpu(name).memory <= 1.08 * published


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelLayout(), 0),
        # AIConfigurator's NCCL figures for 2, 4 and 8 ranks in MiB, and three all-reduce buffers of 8 MB per rank
        (ParallelLayout(tp=2), 342 * 2**20 + 3 * 2 * 8_000_000),
        (ParallelLayout(tp=4), 392 * 2**20 + 3 * 4 * 8_000_000),
        (ParallelLayout(tp=8), 392 * 2**20 + 3 * 8 * 8_000_000),
        (ParallelLayout(pp=2), 342 * 2**20),
        (ParallelLayout(tp=2, pp=2), 392 * 2**20 + 3 * 2 * 8_000_000),
        (ParallelLayout(tp=8, pp=2), 392 * 2**20 + 3 * 8 * 8_000_000),
    ],
)
def test_buffers_of_communication(layout, expected):
    assert communication_bytes(layout) == expected


def test_captured_batch_sizes():
    assert graph_sizes(1) == [1]
    assert graph_sizes(16) == [1, 2, 4, 8, 16]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 32, 64, 96]
    assert graph_sizes(4095) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 512, 1024, 2048]
    assert graph_sizes(9000)[-1] == 4096


def test_graphs_keep_8_kib_for_each_of_12_kernels_per_layer(models):
    assert graph_bytes(models.LLAMA31_8B, ParallelLayout(), 4) == 3 * 32 * 12 * 8192
    assert graph_bytes(models.LLAMA31_70B, ParallelLayout(pp=3), 1) == 27 * 12 * 8192


ONE = PlannedLimits(max_batch_size=0, max_num_tokens=1, max_seq_len=4096)


def test_activations_of_one_token_where_attention_is_the_widest(models):
    """Queries and attention's output, keys and values; residual stream and normed input; 2 bytes each."""
    slim = models.llama(intermediate_size=1024, head_dim=512)
    attention = 2 * (32 * 512 + 32 * 512 + 2 * 8 * 512)
    assert activation_bytes(slim, FORMATS["none"], ParallelLayout(), ONE) == 3 * 4096 * 2 + attention
    # two of 8 KV heads and 8 of 32 heads on each rank
    assert activation_bytes(slim, FORMATS["none"], ParallelLayout(tp=4), ONE) == 3 * 4096 * 2 + attention // 4


def test_activations_of_one_token_in_fp8(models):
    """Inputs of matrix products take one byte: the normed input and the MLP's activation."""
    mlp = 14336 * 2 * 2 + 14336 + 4096 * 2
    assert activation_bytes(models.LLAMA31_8B, FORMATS["fp8"], ParallelLayout(), ONE) == 2 * 4096 * 2 + 4096 + mlp
    split = 7168 * 2 * 2 + 7168 + 4096 * 2
    assert activation_bytes(models.LLAMA31_8B, FORMATS["fp8"], ParallelLayout(tp=2), ONE) == 2 * 4096 * 2 + 4096 + split


def test_activations_of_one_token_in_experts(models):
    """Qwen3 30B: 8 copies of a token, each permuted in and out (2 x 2048 values) through an expert 768 wide."""
    each = 768 * 2 * 2 + 768 * 2 + 2 * 2048 * 2
    stream = 3 * 2048 * 2
    assert activation_bytes(models.QWEN3_30B, FORMATS["none"], ParallelLayout(), ONE) == stream + 8 * each
    assert activation_bytes(models.QWEN3_30B, FORMATS["none"], ParallelLayout(tp=2, ep=2), ONE) == stream + 4 * each
    halved = 384 * 2 * 2 + 384 * 2 + 2 * 2048 * 2
    assert activation_bytes(models.QWEN3_30B, FORMATS["none"], ParallelLayout(tp=2), ONE) == stream + 8 * halved


def test_activations_of_one_token_with_latent_attention(models):
    """DeepSeek V3 on one GPU: each of 128 heads has its own key, 128 + 64 wide; dense MLP and experts take less."""
    attention = 2 * 192 * (2 * 128 + 2 * 128)
    expected = 3 * 7168 * 2 + attention
    assert activation_bytes(models.DEEPSEEK_V3, FORMATS["none"], ParallelLayout(tp=1, ep=1), ONE) == max(
        expected, 3 * 7168 * 2 + 8 * (2048 * 6 + 7168 * 4)
    )


def test_the_logits_are_padded_to_the_ranks(models):
    odd = models.llama(vocab_size=32001)
    none = activation_bytes(odd, FORMATS["none"], ParallelLayout(8), ONE)
    assert (
        activation_bytes(odd, FORMATS["none"], ParallelLayout(8), PlannedLimits(3, 1, 4096)) - none == 2 * 3 * 32008 * 4
    )


def test_the_cache_takes_its_share_of_what_is_free(models):
    """H100 with Llama 3.1 8B: free are 90 % but for less than a block; what is not free is not given out."""
    memory = plan_memory(
        models.LLAMA31_8B, FORMATS["none"], "bf16", ParallelLayout(), H100, PlannedLimits(64, 8192, 4096)
    )
    free = memory.kv_cache + memory.left
    block = 32 * 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes a token
    assert 0 <= 0.9 * free - memory.kv_cache < block
    assert memory.runtime == 551 * 2**20
    assert memory.weight_bytes == 16_060_522_496
    assert memory.fits
    assert memory.short == 0
