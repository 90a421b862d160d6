"""KV cache by hand."""

from __future__ import annotations

from llmops.build.plan.memory.kv_sizes import sequence_bytes, sequences_that_fit, token_bytes
from llmops.build.plan.memory.parallel_layout import ParallelLayout


def test_bytes_per_token(models):
    assert token_bytes(models.LLAMA31_70B, "bf16") == 327_680  # 2 x 80 layers x 8 heads x 128 x 2 bytes
    assert token_bytes(models.LLAMA2_7B, "bf16") == 524_288  # 2 x 32 x 32 x 128 x 2
    assert token_bytes(models.LLAMA31_70B, "fp8") == 163_840


def test_split_over_ranks_and_stages(models):
    assert token_bytes(models.LLAMA31_70B, "bf16", ParallelLayout(tp=8)) == 327_680 // 8
    assert token_bytes(models.LLAMA31_70B, "bf16", ParallelLayout(tp=2, pp=4)) == 327_680 // 8
    # 4 KV heads on 8 ranks: one head each, held twice
    assert token_bytes(models.QWEN25_7B, "bf16", ParallelLayout(tp=8)) == token_bytes(
        models.QWEN25_7B, "bf16", ParallelLayout(tp=4)
    )


def test_mla_keeps_one_latent_on_every_rank(models):
    expected = 61 * (512 + 64) * 2
    assert token_bytes(models.DEEPSEEK_V3, "bf16") == expected
    assert token_bytes(models.DEEPSEEK_V3, "bf16", ParallelLayout(tp=8)) == expected


def test_300_sequences_of_4k_in_400_gb(models):
    assert sequences_that_fit(400 * 10**9, models.LLAMA31_70B, "bf16", ParallelLayout(), 4096) == 298


def test_sequences_take_whole_blocks_of_32_tokens(models):
    one, full, more = (sequence_bytes(models.LLAMA31_8B, "bf16", ParallelLayout(), length) for length in (1, 32, 33))
    assert one == full == 32 * token_bytes(models.LLAMA31_8B, "bf16")
    assert more == 2 * full


def test_layers_with_a_sliding_window_keep_every_token(models):
    """Neither trtllm-build's engines nor the LLM API bound a layer's cache unless max_attention_window says so."""
    per_layer = 2 * 8 * 64 * 2
    for length in (128, 4096, 8192):
        assert sequence_bytes(models.GPT_OSS_20B, "bf16", ParallelLayout(), length) == 24 * length * per_layer
