"""trtllm-build: published recipes come out, and what 1.2.1 would refuse is refused before anything starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.build.trtllm.flag_rules import FlagContext
from llmops.build.trtllm.trtllm_build_arguments import EngineOptions, LoraOptions, SpeculativeOptions, build_arguments
from llmops.build.trtllm.trtllm_build_flags import FLAGS, effective_flags, from_argv, to_argv
from llmops.errors import InputError
from tests.trtllm.recipes import RECIPES


def options(family="llama", quant="none", tp=1, pp=1, **asked):
    lora = asked.pop("lora", None)
    values = {"max_batch_size": 64, "max_input_len": 1024, "max_seq_len": 2048, "max_num_tokens": 8192, **asked}
    extra = values.pop("extra", {})
    speculative = values.pop("speculative", None)
    return EngineOptions(
        subject=FlagContext(family, quant, tp, pp), workers=tp * pp, extra=extra, speculative=speculative,
        lora=LoraOptions(*lora) if lora else None, **values,
    )  # fmt: skip


def test_there_are_a_dozen_recipes_of_several_families_and_precisions():
    assert len(RECIPES) >= 12
    assert {r.family for r in RECIPES} >= {"llama", "mixtral", "qwen2", "gemma2"}
    assert {r.quant for r in RECIPES} >= {"none", "fp8", "fp8_pc_pt", "int4_awq", "int8_sq", "int8_wo"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_published_recipe(recipe):
    made = build_arguments(options(recipe.family, recipe.quant, recipe.tp, recipe.pp, **recipe.asked), "c", "e")
    ours = effective_flags(made)
    different = {name for name, value in recipe.published.items() if ours[name] != value}
    assert different == set(recipe.differs)
    # what no recipe says is in-flight batching with a paged cache
    assert (ours["remove_input_padding"], ours["kv_cache_type"]) == ("enable", "paged")
    assert from_argv(to_argv(made)) == made


def test_the_whole_command_of_an_fp8_llama_on_eight_gpus():
    made = build_arguments(options(quant="fp8", tp=8), "checkpoint", "model")
    assert " ".join(to_argv(made)) == (
        "--checkpoint_dir checkpoint --output_dir model --max_batch_size 64 --max_input_len 1024 --max_seq_len 2048 "
        "--max_num_tokens 8192 --max_beam_width 1 --remove_input_padding enable --kv_cache_type paged "
        "--tokens_per_block 32 --context_fmha enable --use_paged_context_fmha enable --use_fp8_context_fmha disable "
        "--multiple_profiles enable --gpt_attention_plugin auto --gemm_plugin disable --nccl_plugin auto "
        "--reduce_fusion enable --user_buffer enable --workers 8"
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"extra": {"gemm_plugins": "auto"}}, "did you mean --gemm_plugin"),
        ({"extra": {"gemm_plugin": "float8"}}, "give one of auto, float16"),
        ({"extra": {"max_beam_width": 0}}, "at least 1"),
        ({"extra": {"opt_num_tokens": 64, "multiple_profiles": "enable"}}, "opt_num_tokens"),
        ({"extra": {"streamingllm": "enable"}}, "no longer supported"),
        ({"extra": {"user_buffer": "enable"}, "quant": "fp8"}, "user_buffer to disable: it needs reduce_fusion"),
        ({"family": "qwen2", "extra": {"reduce_fusion": "enable"}}, "it is for Llama and Gemma 2 on several"),
        ({"extra": {"reduce_fusion": "enable", "user_buffer": "enable"}, "quant": "int4_awq", "tp": 2}, "FP8 models"),
        ({"extra": {"pp_reduce_scatter": "enable"}}, "for Mixtral"),
        ({"extra": {"context_fmha": "disable", "use_paged_context_fmha": "enable"}}, "it needs context_fmha"),
        ({"extra": {"kv_cache_type": "continuous"}}, "kv_cache_type paged"),
        ({"extra": {"remove_input_padding": "disable"}}, "packed input"),
        ({"extra": {"gemm_swiglu_plugin": "fp8"}}, "need --quant fp8"),
        ({"quant": "fp8_pc_pt", "extra": {"fp8_rowwise_gemm_plugin": "disable"}}, "go together"),
        ({"extra": {"lora_dir": ["a"]}}, "--lora_plugin auto"),
        ({"extra": {"max_draft_len": 4}}, "speculative_decoding_mode"),
        ({"extra": {"gather_context_logits": True, "speculative_decoding_mode": "eagle", "max_draft_len": 4}}, "drop"),
        ({"max_input_len": 4096}, "longer than --max_seq_len"),
        ({"max_num_tokens": 32}, "full batch"),
        ({"tp": 2, "extra": {"nccl_plugin": "disable"}}, "more than one GPU"),
        ({"lora": (["x"], 8, ["attention_q"])}, "attn_q"),
    ],
)
def test_refused_before_anything_starts(asked, says):
    with pytest.raises(InputError, match=says.replace("(", r"\(")):
        build_arguments(options(**asked), "c", "e")


def test_an_optimum_of_ones_own_turns_the_profiles_off():
    made = build_arguments(options(extra={"opt_num_tokens": 64}), "c", "e")
    assert made["multiple_profiles"] == "disable"


def test_speculative_decoding():
    made = build_arguments(options(speculative=SpeculativeOptions("eagle", 5)), "c", "e")
    assert to_argv(made)[-6:-2] == ["--speculative_decoding_mode", "eagle", "--max_draft_len", "5"]


def _value(flag):
    if flag.kind == "present":
        return st.just(True)
    if flag.kind == "int":
        return st.integers(max(flag.minimum, 0), 10**6)
    if flag.kind in ("paths", "words"):
        item = st.sampled_from(flag.choices) if flag.choices else st.text("abc/", min_size=1)
        return st.lists(item, min_size=1, max_size=3)
    return st.sampled_from(flag.choices) if flag.choices else st.text("abc/", min_size=1)


@given(st.fixed_dictionaries({}, optional={name: _value(flag) for name, flag in FLAGS.items()}))
def test_any_valid_arguments_survive_the_command_line(arguments):
    assert from_argv(to_argv(arguments)) == arguments
