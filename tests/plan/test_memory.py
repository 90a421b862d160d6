"""The bytes of one GPU add up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.build.checkpoint.known_models import known_model
from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.kv_sizes import BLOCK_TOKENS, sequence_bytes, state_bytes, token_bytes
from llmops.build.plan.memory.memory_budget import PlannedLimits, activation_bytes, plan_memory
from llmops.build.plan.memory.parallel_layout import ParallelLayout, layout_problem
from llmops.build.plan.memory.weight_bytes import checkpoint_weights, rank_weights, stage_weights
from llmops.build.plan.model_lookup import look_up_model
from llmops.build.plan.search.plan_request import find_precision
from llmops.build.quant_formats import FORMATS, PLANNED

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
    limits = PlannedLimits(1, 8192, 4096)
    memory = plan_memory(models.LLAMA31_70B, FORMATS["none"], "bf16", ParallelLayout(), H100, limits)
    assert (memory.fits, memory.kv_cache) == (False, 0)
    assert used(memory) - H100.memory == memory.short > 141e9 - H100.memory


def test_activations_of_8b_by_hand(models):
    """8192 tokens: residual and normed input in 2 bytes, gate_up's output, the activation's, the projection's."""
    per_token = 2 * 4096 * 2 + 4096 * 2 + 14336 * 2 * 2 + 14336 * 2 + 4096 * 2
    logits = 2 * 64 * 128256 * 4
    found = activation_bytes(models.LLAMA31_8B, FORMATS["none"], ParallelLayout(), PlannedLimits(64, 8192, 4096))
    assert found == 8192 * per_token + logits


ONE = PlannedLimits(max_batch_size=0, max_num_tokens=1, max_seq_len=4096)


def test_activations_of_one_token_in_experts(models):
    """Qwen3 30B: 8 copies of a token, each permuted in and out (2 x 2048 values) through an expert 768 wide."""
    each = 768 * 2 * 2 + 768 * 2 + 2 * 2048 * 2
    stream = 3 * 2048 * 2
    assert activation_bytes(models.QWEN3_30B, FORMATS["none"], ParallelLayout(), ONE) == stream + 8 * each
    assert activation_bytes(models.QWEN3_30B, FORMATS["none"], ParallelLayout(tp=2, ep=2), ONE) == stream + 4 * each
    halved = 384 * 2 * 2 + 384 * 2 + 2 * 2048 * 2
    assert activation_bytes(models.QWEN3_30B, FORMATS["none"], ParallelLayout(tp=2), ONE) == stream + 8 * halved


def test_the_cache_takes_its_share_of_what_is_free(models):
    """H100 with Llama 3.1 8B: free are 90 % but for less than a block; what is not free is not given out."""
    limits = PlannedLimits(64, 8192, 4096)
    memory = plan_memory(models.LLAMA31_8B, FORMATS["none"], "bf16", ParallelLayout(), H100, limits)
    free = memory.kv_cache + memory.left
    block = 32 * 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes a token
    assert 0 <= 0.9 * free - memory.kv_cache < block
    assert (memory.runtime, memory.weight_bytes) == (551 * 2**20, 16_060_522_496)
    assert (memory.fits, memory.short) == (True, 0)


# -- KV cache by hand


def test_bytes_per_token(models):
    assert token_bytes(models.LLAMA31_70B, "bf16") == 327_680  # 2 x 80 layers x 8 heads x 128 x 2 bytes
    assert token_bytes(models.LLAMA2_7B, "bf16") == 524_288  # 2 x 32 x 32 x 128 x 2
    assert token_bytes(models.LLAMA31_70B, "fp8") == 163_840


def test_split_over_ranks_and_stages(models):
    assert token_bytes(models.LLAMA31_70B, "bf16", ParallelLayout(tp=8)) == 327_680 // 8
    assert token_bytes(models.LLAMA31_70B, "bf16", ParallelLayout(tp=2, pp=4)) == 327_680 // 8
    # 4 KV heads on 8 ranks: one head each, held twice
    eight, four = (token_bytes(models.QWEN25_7B, "bf16", ParallelLayout(tp=tp)) for tp in (8, 4))
    assert eight == four


def test_mla_keeps_one_latent_on_every_rank(models):
    expected = 61 * (512 + 64) * 2
    assert token_bytes(models.DEEPSEEK_V3, "bf16") == expected
    assert token_bytes(models.DEEPSEEK_V3, "bf16", ParallelLayout(tp=8)) == expected


def test_sequences_take_whole_blocks_of_32_tokens(models):
    one, full, more = (sequence_bytes(models.LLAMA31_8B, "bf16", ParallelLayout(), length) for length in (1, 32, 33))
    assert one == full == 32 * token_bytes(models.LLAMA31_8B, "bf16")
    assert more == 2 * full


def test_layers_with_a_sliding_window_keep_every_token(models):
    """Neither trtllm-build's engines nor the LLM API bound a layer's cache unless max_attention_window says so."""
    per_layer = 2 * 8 * 64 * 2
    for length in (128, 4096, 8192):
        assert sequence_bytes(models.GPT_OSS_20B, "bf16", ParallelLayout(), length) == 24 * length * per_layer


# -- Layouts that TensorRT-LLM cannot run are refused with the reason


@pytest.mark.parametrize(
    ("model", "quant", "gpu", "layout", "words"),
    [
        ("LLAMA31_8B", "fp8", "a100-sxm", ParallelLayout(), "fp8 needs SM89; a100-sxm is SM80"),
        # the kernels of TensorRT-LLM: fused_moe_cutlass.py, _QUANT_SUPPORT_TABLE, and fp8_rowwise_gemm_template.h
        ("QWEN3_30B", "fp8_block", "l40s", ParallelLayout(), "no kernels for fp8_block experts on l40s"),
        ("LLAMA31_8B", "fp8_block", "l40s", ParallelLayout(), None),
        ("GPT_OSS_20B", "mxfp4", "a100-sxm", ParallelLayout(), "no kernels for mxfp4 experts on a100-sxm"),
        ("GPT_OSS_20B", "mxfp4", "b200-sxm", ParallelLayout(), None),
        ("LLAMA31_8B", "fp8_pc_pt", "b200-sxm", ParallelLayout(), "no kernels for fp8_pc_pt weights on b200-sxm"),
        # 1.3.0rc29, llm_speculative_decoding.py: "only available on Hopper+ (SM>=90)"
        ("DEEPSEEK_V3", "none", "l40s", ParallelLayout(tp=8), "no kernels for latent attention on l40s"),
        ("DEEPSEEK_V3", "none", "h100-sxm", ParallelLayout(tp=8), None),
        ("LLAMA31_8B", "fp8_pc_pt", "l40s", ParallelLayout(), None),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(tp=16), "does not fit a node of 8"),
        ("QWEN25_7B", "none", "h100-sxm", ParallelLayout(tp=8), "28 attention heads are not divisible by tp 8"),
        ("PHI4", "none", "h100-sxm", ParallelLayout(tp=4), "10 KV heads and tp 4"),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(tp=2, ep=2), "no experts"),
        ("MIXTRAL_8X7B", "none", "h100-sxm", ParallelLayout(tp=8, ep=3), "ep 3 does not divide tp 8"),
        ("QWEN25_7B", "int4_awq", "h100-sxm", ParallelLayout(tp=4), None),
        ("QWEN3_30B", "int4_awq", "h100-sxm", ParallelLayout(tp=4), "the expert size of a rank is 192"),
        ("LLAMA31_405B", "fp8", "h100-sxm", ParallelLayout(tp=8, pp=2), None),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(pp=32), None),
        ("LLAMA31_8B", "none", "h100-sxm", ParallelLayout(pp=33), "33 pipeline stages are more than the 32 layers"),
        # 10 KV heads: 40 heads divide by 5 and by 8, the KV heads by 5 only
        ("PHI4", "none", "h100-sxm", ParallelLayout(tp=5), None),
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


@pytest.mark.parametrize(("name", "gpu", "kv", "words"), [
    ("microsoft/Phi-3.5-mini-instruct", "b200-sxm", "fp8", "no FP8 attention for heads of 96 on b200-sxm; use --kv-d"),
    ("microsoft/Phi-3.5-mini-instruct", "b200-sxm", "bf16", None),
    ("deepseek-ai/DeepSeek-V3.2", "h200-sxm", "fp8", "no FP8 KV cache for sparse attention on h200-sxm; use --kv-d"),
    ("deepseek-ai/DeepSeek-V3.2", "b200-sxm", "fp8", None),
])  # fmt: skip
def test_an_fp8_cache_without_kernels_is_refused(name, gpu, kv, words):
    model = look_up_model(name).checkpoint.architecture
    reason = layout_problem(model, FORMATS["none"], find_gpu(gpu), ParallelLayout(tp=8), kv)
    assert (reason is None) if words is None else (reason is not None and words in reason), reason


# -- Bytes of weights against published checkpoints, hand figures and real exports


# `metadata.total_size` of the models' model.safetensors.index.json on the Hugging Face hub
PUBLISHED = {
    "LLAMA2_7B": 13_476_835_328, "LLAMA31_8B": 16_060_522_496, "LLAMA31_70B": 141_107_412_992,
    "LLAMA31_405B": 811_706_777_600, "MISTRAL_7B": 14_483_464_192, "MIXTRAL_8X7B": 93_405_585_408,
    "MIXTRAL_8X22B": 281_241_268_224, "QWEN25_7B": 15_231_233_024, "QWEN3_30B": 61_064_245_248,
    "GEMMA2_9B": 18_483_411_968, "PHI4": 29_319_014_400, "DEEPSEEK_V3": 688_586_727_753,
    "GPT_OSS_20B": 13_761_264_768,
}  # fmt: skip


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


def test_tied_embeddings_are_held_once_unless_the_ends_are_on_different_stages(models):
    tied = models.shapes_of("meta-llama/Llama-3.1-8B", tie_word_embeddings=True)
    assert "lm_head" not in rank_weights(tied, FORMATS["none"], ParallelLayout())
    assert "lm_head" in stage_weights(tied, FORMATS["none"], ParallelLayout(pp=2), 1)


def test_pipeline_remainder_goes_to_the_first_stages(models):
    """80 layers in 3 stages: 27, 27, 26; the first has the embedding too."""
    layer = stage_weights(models.LLAMA31_70B, FORMATS["none"], ParallelLayout(pp=80), 5)
    stages = [stage_weights(models.LLAMA31_70B, FORMATS["none"], ParallelLayout(pp=3), stage) for stage in range(3)]
    assert [stage["mlp"] // layer["mlp"] for stage in stages] == [27, 27, 26]
    assert rank_weights(models.LLAMA31_70B, FORMATS["none"], ParallelLayout(pp=3)) == dict(stages[0])


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


def test_recurrent_layers_have_states_instead_of_a_cache():
    """Computed by hand from Qwen3.5 27B's config.json: 16 of 64 layers have attention, the others 48 heads of 128²."""
    model = Architecture.from_hf_config(known_model("Qwen/Qwen3.5-27B").config)
    assert token_bytes(model, "bf16") == 16 * 2 * 4 * 256 * 2
    assert token_bytes(model, "bf16", ParallelLayout(pp=4)) == 4 * 2 * 4 * 256 * 2
    kept_inputs = 3 * (48 * 128 + 2 * 16 * 128) * 2
    assert state_bytes(model, ParallelLayout()) == 48 * (48 * 128 * 128 * 4 + kept_inputs)
    assert state_bytes(model, ParallelLayout(tp=2, pp=2)) == state_bytes(model, ParallelLayout()) / 4
    limits = PlannedLimits(max_batch_size=100, max_num_tokens=2048, max_seq_len=4096)
    budget = plan_memory(model, FORMATS["none"], "bf16", ParallelLayout(), find_gpu("h200"), limits)
    assert budget.states == 100 * state_bytes(model, ParallelLayout())
