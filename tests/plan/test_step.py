"""The operations of a step, counted: each amount by hand or from the model's published size."""

from __future__ import annotations

import pytest

from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.speed.step_time import SEQUENCE_OVERHEAD, STEP_OVERHEAD, Prefill, StepModel
from llmops.build.quant_formats import FORMATS

# of Llama 3.1 8B: safetensors' `total_size` in 2-byte values, less embedding and 65 norms
MATRICES_8B = 16_060_522_496 // 2 - 128256 * 4096 - 65 * 4096
HEAD_8B = 128256 * 4096


class Counted:
    """A second per unit of one operation, and nothing for the others."""

    label = "counted"

    def __init__(self, counted: str) -> None:
        self.counted = counted

    def _if(self, name: str, amount: float) -> float:
        return amount if name == self.counted else 0.0

    def gemm(self, m, n, k, precision):
        return self._if("gemm", m * n * k) + self._if(f"gemm {precision}", m * n * k)

    def prefill(self, prompts, tokens, prefix, attention):
        return self._if("prefill", prompts * tokens * (1000 + prefix)) + self._if("window", attention.window)

    def decode(self, batch, length, attention):
        read = batch * (min(length, attention.window) if attention.window else length)
        return self._if("decode", read * attention.kv_bytes) + self._if(f"decode {attention.compute}", 1.0)

    def moe(self, tokens, experts, precision):
        return self._if("moe", tokens * experts.top_k * 3 * experts.hidden * experts.intermediate / experts.tp)

    def all_reduce(self, values, ranks):
        return self._if("all_reduce", values) if ranks > 1 else 0.0

    def memory(self, bytes_):
        return self._if("memory", bytes_)

    def send(self, bytes_, nodes):
        return self._if("send between nodes" if nodes else "send", bytes_)


def amount(model, operation, *step, layout=ParallelLayout(), quant="none", kv="bf16", nodes=False) -> float:
    """Return the amount of one operation in a step, without the host's work."""
    steps = StepModel(model, FORMATS[quant], kv, layout, Counted(operation), nodes)
    return steps.seconds(*step) - STEP_OVERHEAD - SEQUENCE_OVERHEAD * step[0]


def test_the_host_s_work(models):
    steps = StepModel(models.LLAMA31_8B, FORMATS["none"], "bf16", ParallelLayout(), Counted("nothing"))
    assert steps.seconds(50, 100) == pytest.approx(1.5e-3 + 50 * 2e-6)
    assert steps.seconds(0, 0, Prefill(1, 100)) == pytest.approx(1.5e-3)
    assert steps.seconds(0, 0) == 0


def test_each_token_passes_each_matrix_once(models):
    """A prompt's tokens but the last skip the output head."""
    body = MATRICES_8B - HEAD_8B
    assert amount(models.LLAMA31_8B, "gemm", 3, 100) == pytest.approx(3 * MATRICES_8B)
    assert amount(models.LLAMA31_8B, "gemm", 0, 0, Prefill(2, 500)) == pytest.approx(1000 * body + 2 * HEAD_8B)
    mixed = amount(models.LLAMA31_8B, "gemm", 3, 100, Prefill(2, 500))
    assert mixed == pytest.approx(1003 * body + 5 * HEAD_8B)
    assert amount(models.LLAMA31_8B, "gemm", 3, 100, layout=ParallelLayout(tp=8)) == pytest.approx(3 * MATRICES_8B / 8)


def test_the_output_head_stays_as_it_is(models):
    assert amount(models.LLAMA31_8B, "gemm none", 1, 100, quant="fp8") == pytest.approx(HEAD_8B)
    assert amount(models.LLAMA31_8B, "gemm fp8", 1, 100, quant="fp8") == pytest.approx(MATRICES_8B - HEAD_8B)


def test_a_draft_is_a_layer_and_the_head_and_each_proposed_token_is_checked(models):
    layer = (MATRICES_8B - HEAD_8B) // 32
    drafted = amount(models.LLAMA31_8B, "gemm", 5, 100, None, 3)
    assert drafted == pytest.approx(5 * 4 * MATRICES_8B + 3 * 5 * (layer + HEAD_8B))


def test_the_cache_is_read_once_in_each_layer(models):
    """Llama 3.1 8B keeps 2 x 8 x 128 values per token and layer."""
    token = 32 * 2 * 8 * 128
    assert amount(models.LLAMA31_8B, "decode", 4, 1000) == pytest.approx(4 * 1000 * token * 2)
    assert amount(models.LLAMA31_8B, "decode", 4, 1000, kv="fp8") == pytest.approx(4 * 1000 * token)
    assert amount(models.LLAMA31_8B, "decode", 4, 1000, layout=ParallelLayout(tp=2)) == pytest.approx(4 * 1000 * token)
    assert amount(models.LLAMA31_8B, "decode", 4, 0) == pytest.approx(4 * token * 2)
    assert amount(models.LLAMA31_8B, "decode", 0, 0, Prefill(1, 10)) == 0
    assert amount(models.LLAMA31_8B, "prefill", 4, 1000, Prefill(3, 10, 7)) == pytest.approx(32 * 3 * 10 * 1007)
    # 61 layers of one latent vector of 512 + 64 values
    assert amount(models.DEEPSEEK_V3, "decode", 2, 100) == pytest.approx(61 * 2 * 100 * 576 * 2)


def test_attention_in_fp8_takes_weights_and_cache_in_fp8(models):
    counts = {
        (quant, kv): amount(models.LLAMA31_8B, "decode fp8", 1, 10, quant=quant, kv=kv)
        for quant in ("fp8", "none")
        for kv in ("fp8", "bf16")
    }
    assert {key: round(count) for key, count in counts.items()} == {
        ("fp8", "fp8"): 32, ("fp8", "bf16"): 0, ("none", "fp8"): 0, ("none", "bf16"): 0,
    }  # fmt: skip


def test_half_of_gpt_oss_s_layers_look_back_128_tokens(models):
    """12 layers with a window of 128, 12 without; 2 x 8 heads x 64 values of 2 bytes."""
    expected = 12 * (128 + 1000) * 2 * 8 * 64 * 2
    assert amount(models.GPT_OSS_20B, "decode", 1, 1000) == pytest.approx(expected)


def test_two_sums_over_the_ranks_in_each_layer(models):
    assert amount(models.LLAMA31_8B, "all_reduce", 7, 100, layout=ParallelLayout(tp=2)) == pytest.approx(
        7 * 32 * 2 * 4096
    )
    assert amount(models.LLAMA31_8B, "all_reduce", 7, 100) == pytest.approx(0)


def test_element_wise_kernels_of_one_token(models):
    """Per layer: two norms that read and write two streams; rotary embedding of 32 + 8 heads of 128, 2 bytes in and
    out; the MLP's gate, up and product of 14336 values, 2 bytes each. Then the embedding's row, in and out, and four
    passes over the logits in FP32."""
    layer = 2 * 4 * 4096 * 2 + 4 * 128 * 40 + 3 * 2 * 14336
    assert amount(models.LLAMA31_8B, "memory", 1, 10) == pytest.approx(32 * layer + 4 * 4096 + 4 * 4 * 128256)


def test_element_wise_kernels_with_latent_attention(models):
    """DeepSeek V3: the rotary embedding is that of 128 queries and one key; three layers are dense, 58 have a shared
    expert."""
    layer = 2 * 4 * 7168 * 2 + 4 * 192 * (128 + 1)
    activations = 3 * 2 * (3 * 18432 + 58 * 2048)
    expected = 61 * layer + activations + 4 * 7168 + 4 * 4 * 129280
    assert amount(models.DEEPSEEK_V3, "memory", 1, 10) == pytest.approx(expected)


def test_stages_send_the_stream_on(models):
    layout = ParallelLayout(pp=2)
    assert amount(models.LLAMA31_8B, "send", 3, 10, layout=layout) == pytest.approx(3 * 4096 * 2)
    assert amount(models.LLAMA31_8B, "send between nodes", 3, 10, layout=layout, nodes=True) == pytest.approx(
        3 * 4096 * 2
    )
    assert amount(models.LLAMA31_8B, "send", 3, 10) == pytest.approx(0)
    half = (MATRICES_8B - HEAD_8B) / 2 + HEAD_8B
    assert amount(models.LLAMA31_8B, "gemm", 3, 10, layout=layout) == pytest.approx(3 * half)


def test_experts_of_each_token(models):
    """Qwen3 30B: 8 of 128 experts of 3 x 2048 x 768 in 48 layers. DeepSeek V3: 58 of its 61 layers have 8 of 7168 x
    2048 and a shared one, the first three a dense MLP of 18432."""
    assert amount(models.QWEN3_30B, "moe", 5, 10) == pytest.approx(48 * 5 * 8 * 3 * 2048 * 768)
    assert amount(models.DEEPSEEK_V3, "moe", 5, 10) == pytest.approx(58 * 5 * 8 * 3 * 7168 * 2048)
    query = 7168 * 1536 + 1536 * 128 * 192
    attention = query + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    others = 61 * attention + 3 * 3 * 7168 * 18432 + 58 * (3 * 7168 * 2048 + 7168 * 256) + 129280 * 7168
    assert amount(models.DEEPSEEK_V3, "gemm", 1, 10) == pytest.approx(others)
