"""trtllm-build: published recipes come out, and what 1.2.1 would refuse is refused before anything starts."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.build.checkpoint import open_checkpoint
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.spec import BuildSpec
from llmops.build.targets.build_target import get_target
from llmops.build.targets.nvidia import stage_estimates
from llmops.build.trtllm.flag_rules import FlagContext
from llmops.build.trtllm.trtllm_build_arguments import EngineOptions, build_arguments
from llmops.build.trtllm.trtllm_build_flags import FLAGS, effective_flags, from_argv, to_argv
from llmops.errors import InputError
from tests.plan.published_shapes import config_of
from tests.support.commands import llmops
from tests.support.tiny_models import write_checkpoint
from tests.trtllm.recipes import RECIPES


def options(family="llama", quant="none", tp=1, pp=1, **asked):
    lora, gpu = asked.pop("lora", None), find_gpu(asked.pop("gpu", "h100-sxm"))
    values = {"max_batch_size": 64, "max_input_len": 1024, "max_seq_len": 2048, "max_num_tokens": 8192, **asked}
    extra = values.pop("extra", {})
    names = ("lora_dir", "max_lora_rank", "lora_target_modules")
    features = {"lora_plugin": "auto", **dict(zip(names, lora, strict=True))} if lora else {}
    subject = FlagContext(family, quant, tp, pp, sm=gpu.sm, multicast=gpu.multicast)
    return EngineOptions(subject=subject, workers=tp * pp, extra=extra, features=features, **values)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_published_recipe(recipe):
    made = build_arguments(options(recipe.family, recipe.quant, recipe.tp, recipe.pp, **recipe.asked), "c", "e")
    ours = effective_flags(made)
    different = {name for name, value in recipe.published.items() if ours[name] != value}
    assert different == set(recipe.differs)
    # what no recipe says is in-flight batching with a paged cache
    assert (ours["remove_input_padding"], ours["kv_cache_type"]) == ("enable", "paged")
    assert from_argv(to_argv(made)) == made


SWIGLU = {"gemm_swiglu_plugin": "fp8"}
LOOKAHEAD = {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 83}


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
        ({"extra": {"user_buffer": "enable"}, "quant": "fp8", "tp": 2, "gpu": "l40s"}, "that NVLink joins"),
        ({"extra": {"user_buffer": "enable"}, "quant": "fp8", "tp": 16}, "at most 8 GPUs of one machine"),
        ({"extra": {"pp_reduce_scatter": "enable"}}, "for Mixtral"),
        ({"extra": {"context_fmha": "disable", "use_paged_context_fmha": "enable"}}, "it needs context_fmha"),
        ({"extra": {"kv_cache_type": "continuous"}}, "kv_cache_type paged"),
        # runtime/modelConfig.h, supportsInflightBatching, without which 1.2.1 trtGptModelInflightBatching.cpp loads no
        # engine ("requires GPT attention/Mamba Conv 1d plugin with packed input and paged KV cache")
        ({"extra": {"kv_cache_type": "continuous", "use_paged_context_fmha": "disable"}}, "kv_cache_type paged"),
        ({"extra": {"kv_cache_type": "disabled", "use_paged_context_fmha": "disable"}}, "kv_cache_type paged"),
        ({"extra": {"gpt_attention_plugin": "disable"}}, "--gpt_attention_plugin: keep the defaults"),
        # examples/sample_weight_stripping: trtllm-refit makes an engine with weights of such an engine
        ({"extra": {"strip_plan": True}}, "leaves the weights out"),
        ({"extra": {"remove_input_padding": "disable"}}, "packed input"),
        ({"extra": SWIGLU}, "need --quant fp8"),
        # 1.2.1 builder.py, optimize_model_with_config: "GemmSwiGLU plugin requires --use_fused_mlp flag"
        ({"quant": "fp8", "extra": {**SWIGLU, "use_fused_mlp": "disable"}}, "need --use_fused_mlp"),
        ({"quant": "fp8_pc_pt", "extra": {"fp8_rowwise_gemm_plugin": "disable"}}, "go together"),
        ({"extra": {"lora_dir": ["a"]}}, "--lora_plugin auto"),
        ({"extra": {"max_draft_len": 4}}, "speculative_decoding_mode"),
        ({"extra": {"gather_context_logits": True, "speculative_decoding_mode": "eagle", "max_draft_len": 4}}, "drop"),
        ({"extra": {"tokens_per_block": 48}}, "power of two"),
        ({"max_input_len": 4096}, "longer than --max_seq_len"),
        ({"max_num_tokens": 32}, "full batch"),
        ({"tp": 2, "extra": {"nccl_plugin": "disable"}}, "more than one GPU"),
        ({"lora": (["x"], 8, ["attention_q"])}, "attn_q"),
        # quantization/layers.py, Fp8RowwiseAttention and Fp8RowwiseMLP: "lora is not supported on … now"; the latter's
        # forward takes no all_reduce_params, which 1.2.1 models/llama/model.py hands it with reduce_fusion
        ({"lora": (["x"], 8, ["attn_q"]), "quant": "fp8_pc_pt"}, "fp8_pc_pt take no adapters"),
        ({"quant": "fp8_pc_pt", "tp": 2, "extra": {"reduce_fusion": "enable"}}, "not for --quant fp8_pc_pt"),
        ({"lora": (["x"], 8, ["mlp_gate"]), "quant": "fp8", "extra": SWIGLU}, "take no adapters"),
        # loraPlugin.cpp counts one token for each request in generation, and ends the process where the step has more:
        # "LoraParams and input dims don't match, lora tokens %d input tokens %d"
        ({"lora": (["x"], 8, ["attn_q"]), "extra": LOOKAHEAD}, "engines of lookahead_decoding take no adapters"),
    ],
)
def test_refused_before_anything_starts(asked, says):
    with pytest.raises(InputError, match=says.replace("(", r"\(")):
        build_arguments(options(**asked), "c", "e")


def test_fusions_are_left_out_where_layers_do_not_take_them():
    """1.2.1 models/llama/model.py: with reduce_fusion the MLP gets all_reduce_params and a plain tensor, neither of
    which quantization/layers.py, Fp8RowwiseFusedGatedMLP.forward takes; with user_buffer it gets FP8, which
    layers/lora.py hands to a plugin of the model's dtype.
    """
    assert "reduce_fusion" not in build_arguments(options(quant="fp8_pc_pt", tp=8), "c", "e")
    adapted = build_arguments(options(quant="fp8", tp=8, lora=(["x"], 8, ["attn_q"])), "c", "e")
    assert (adapted["reduce_fusion"], "user_buffer" in adapted) == ("enable", False)


@pytest.mark.parametrize(("gpu", "tp", "used"), [("h200", 8, True), ("l40s", 2, False), ("h100-pcie", 2, False),
                                                 ("h100-sxm", 16, False)])  # fmt: skip
def test_user_buffers_are_for_gpus_with_multicast_in_one_machine(gpu, tp, used):
    """1.2.1 kernels/userbuffers/userbuffers.cu, allreduce2_userbuff_inplace_rmsnorm_quant: without multicast
    "TLLM_CHECK(0)", and "userbuffer based kernels not implemented when SM < 90"; userbuffers-host.cpp,
    create_communicator_grouped2: ends the process if cuMulticastCreate fails, and hands a file descriptor to the other
    ranks through a local socket.
    """
    made = build_arguments(options(quant="fp8", tp=tp, gpu=gpu), "c", "e")
    assert (made["reduce_fusion"], "user_buffer" in made) == ("enable", used)


def test_an_optimum_of_ones_own_turns_the_profiles_off():
    made = build_arguments(options(extra={"opt_num_tokens": 64}), "c", "e")
    assert made["multiple_profiles"] == "disable"


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


# -- `llmops build --dry-run`: config.json is enough, and the machine at hand need not be the one that builds


# its safetensors index counts 70,553,706,496 parameters
LLAMA = config_of("meta-llama/Llama-3.3-70B-Instruct")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def dry_run(checkpoint: Path, *words: str) -> str:
    pytest.importorskip("modelopt")
    text = llmops("build", checkpoint, "-o", checkpoint / "engine", "--dry-run", "--tp", "8", *words).output
    assert not (checkpoint / "engine").exists()
    return text


def test_a_70b_engine_is_planned_on_a_laptop(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_estimates, "available_memory", lambda: 16 << 30)
    text = dry_run(checkpoint, "--target", "tensorrt", "--quant", "fp8", "--kv-cache", "fp8", "--gpu", "h100-sxm")
    assert "70.55 billion parameters" in text
    said = r"not on this machine: The stage 'quantise and export' needs about \d+\.\d GiB of memory, and 16.0"
    assert re.search(said, text)
    rows = {line[:28].strip(): line[28:].split() for line in text.splitlines() if "GiB" in line and line[:1] != "n"}
    assert list(rows)[-4:] == ["quantise and export", "quality gate", "trtllm-build, 8 ranks", "serving, weights only"]
    # 1 byte per weight of the layers, 2 per value of the embedding and the output matrix
    expected = (70_553_706_496 - 2 * 128256 * 8192 + 4 * 128256 * 8192) / 2**30
    assert float(rows["serving, weights only"][2]) == pytest.approx(expected, abs=0.1)
    assert "--user_buffer enable" in text
    assert "inside nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in text


def test_a_tied_output_matrix_is_stored_twice_in_an_engine(checkpoint: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    (checkpoint / "config.json").write_text(json.dumps(tied))
    sizes = []
    for target in ("tensorrt", "pytorch"):
        text = dry_run(checkpoint, "--target", target, "--quant", "fp8", "--gpu", "h100-sxm")
        sizes.append(float(re.search(r"^serving, weights only.* ([\d.]+) GiB +[\d.]+ GiB$", text, re.M)[1]))
    assert sizes[0] - sizes[1] == pytest.approx(2 * 128256 * 8192 / 2**30, abs=0.1)


def refused(checkpoint: Path, *words: str) -> str:
    with pytest.raises(InputError) as error:
        llmops("build", checkpoint, "-o", checkpoint / "e", "--dry-run", *words)
    return error.value.message


def test_gpus_that_cannot_run_or_hold_it(checkpoint: Path) -> None:
    words = ("--target", "tensorrt", "--quant")
    assert refused(checkpoint, *words, "fp8", "--gpu", "h1000").startswith("The GPU 'h1000' is unknown")
    assert refused(checkpoint, *words, "fp8", "--gpu", "a100-sxm", "--tp", "8") == (
        "--gpu a100-sxm has no FP8 arithmetic, which fp8 weights need; use a newer GPU, or --quant none, int4_awq, "
        "int8_sq, int8_wo, int4_wo."
    )
    for words_of in (("int4_awq",), ("fp8", "--kv-cache", "int8")):
        assert refused(checkpoint, *words, *words_of, "--gpu", "b200-sxm", "--tp", "8").startswith(
            "For --gpu b200-sxm, trtllm-build makes engines only with --quant none or fp8, and --kv-cache auto or fp8"
        )
    # NotImplementedError in 1.2.1 PluginConfig.validate
    fast = ("fp8", "--gpu", "b200-sxm", "--set", "flag.low_latency_gemm_plugin=fp8")
    assert refused(checkpoint, *words, *fast, "--tp", "8").startswith("trtllm-build: a B200 has no --gemm_swiglu")
    # 141.1 GB in bfloat16 and 81,559 MiB each
    assert refused(checkpoint, *words, "none", "--gpu", "h100-sxm") == (
        "The weights take 131 GiB, and 1 x h100-sxm have 80 GiB; raise --tp or --pp, name a larger --gpu, or choose a "
        "--quant of fewer bits."
    )


def test_heads_without_fp8_attention_on_a_b200(checkpoint: Path) -> None:
    """NVIDIA/TensorRT-LLM #8308: Phi-3-mini in FP8 on a B200, "FP8 FMHA cannot be enabled"."""
    phi = {**LLAMA, "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 96}
    (checkpoint / "config.json").write_text(json.dumps(phi))
    words = ("--target", "tensorrt", "--quant", "fp8", "--gpu", "b200-sxm")
    assert refused(checkpoint, *words, "--kv-cache", "fp8") == (
        "On --gpu b200-sxm, TensorRT-LLM has no FP8 attention for heads of 96; use --kv-cache auto."
    )
    dry_run(checkpoint, *words)
    quantised = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps({"quantization": quantised}))
    for flags in ((), ("--kv-cache", "fp8")):
        assert refused(checkpoint, "--target", "pytorch", "--gpu", "b200-sxm", *flags).endswith(
            "for heads of 96; name an H100 or H200, or give another checkpoint."
        )


def test_a_quantised_checkpoint_is_planned_as_it_is_stored(checkpoint: Path) -> None:
    """The safetensors files of openai/gpt-oss-120b hold 65,248,815,744 bytes."""
    (checkpoint / "config.json").write_text(json.dumps(config_of("openai/gpt-oss-120b")))
    text = dry_run(checkpoint, "--target", "pytorch", "--gpu", "h100-sxm")
    row = next(line for line in text.splitlines() if line.startswith("serving"))
    assert float(row[28:].split()[0]) == pytest.approx(65_248_815_744 / 2**30, rel=0.01)


def prepare(spec: BuildSpec, says: str = ""):
    """Return the job of a build, or None if it is refused with `says`."""
    with pytest.raises(InputError, match=says) if says else nullcontext():
        return get_target(spec.target).prepare(spec, open_checkpoint(spec.checkpoint))


TWO_WINDOWS = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}


@pytest.mark.parametrize(
    ("family", "change", "options", "expected"),
    [
        ("gemma3", TWO_WINDOWS, {}, ("128,512", "false")),
        ("gemma2", {}, {"max_seq_len": 128}, (None, None)),
        ("gemma2", {}, {"options": {"serve.enable_kv_cache_reuse": "true"}}, ("128,512", "true")),
        ("mistral", {"sliding_window": 64}, {}, ("64", None)),
        ("mistral", {}, {}, (None, None)),
    ],
)
def test_the_backend_gets_the_windows_of_layers(tmp_path, family, change, options, expected):
    """The engine has none: examples/models/core/gemma/README.md runs Gemma 3 1B with
    `--max_attention_window_size 512 512 512 512 512 3100` and without reuse, which with several
    windows cost accuracy until TensorRT-LLM #10875 (January 2026).
    """
    folder = write_checkpoint(tmp_path / "tiny", family, **change)
    made = prepare(BuildSpec(str(folder), tmp_path / "engine", "tensorrt", **options))
    assert (made.serve.get("max_attention_window_size"), made.serve.get("enable_kv_cache_reuse")) == expected


DRAFT_TOKENS = {"speculative_mode": "draft_tokens_external"}


@pytest.mark.parametrize(
    ("length", "pp", "options", "says"),
    [
        (512, 1, DRAFT_TOKENS, "needs reuse of the KV cache"),
        (128, 1, {**DRAFT_TOKENS, "serve.enable_kv_cache_reuse": "false"}, "needs reuse of the KV cache"),
        (128, 1, DRAFT_TOKENS, ""),
        (128, 1, {"serve.kv_cache_onboard_blocks": "false"}, "no engine with paged context FMHA loads"),
        # tensorrtllm_backend docs/model_config.md: "only supported for an engine built with `weight_streaming` on"
        (128, 1, {"serve.gpu_weights_percent": "0.2"}, "needs --set flag.weight_streaming=true"),
        (128, 1, {"serve.gpu_weights_percent": "0.2", "flag.weight_streaming": "true"}, ""),
        (128, 1, {"serve.decoding_mode": "lookahead"}, "this engine decodes by top_k_top_p only; leave it out"),
        (128, 1, {"serve.decoding_mode": ""}, ""),
        (512, 2, {}, "multiple of 2 layers; use --tp"),
        (512, 3, {}, ""),
        (128, 2, {}, ""),
    ],
)
def test_what_the_runtime_would_not_load_is_refused(tmp_path, length, pp, options, says):
    """Checks of cpp/tensorrt_llm/batch_manager/trtGptModelInflightBatching.cpp (stored): "KV cache block reuse
    must be enabled for speculative decoding target model", "KV cache blocks need to be onboarded if context FMHA".

    Its getDecodingMode: "Model is not built with Lookahead decoding … Overwriting"; before, model_instance_state.cc
    throws "Decoding mode is set to lookahead but lookahead parameters are not specified".

    Its attention takes the window `(firstLayerId + i) % length` of a stage's layer i (transformerBuffers.cpp), its
    caches that of `i % length` (kvCacheManager.cpp, groupLayersByWindowSize): alike if a stage is a multiple.
    """
    folder = write_checkpoint(tmp_path / "tiny", "gemma3", **TWO_WINDOWS)
    prepare(BuildSpec(str(folder), tmp_path / "engine", "tensorrt", max_seq_len=length, pp=pp, options=options), says)


@pytest.mark.parametrize(
    ("family", "windows", "says"),
    [
        ("llama", "128,512", "not 128,512; add --max-seq-len 128"),
        ("llama", "512", ""),
        ("qwen2", "", ""),
        ("gemma2", "", "does not have it for Gemma and Phi"),
        ("gemma3", "", "does not have it for Gemma and Phi"),
        ("phi3", "", "does not have it for Gemma and Phi"),
    ],
)
def test_lookahead_is_refused_where_it_does_not_build_or_load(tmp_path, family, windows, says):
    """1.2.1 modeling_utils.py hands spec_decoding_params to GemmaModel and Phi3Model, whose `forward` has no such
    argument; trtGptModelInflightBatching.cpp: "Rewinding KV cache blocks for variable SWA models isn't supported".
    """
    folder = str(write_checkpoint(tmp_path / "tiny", family))
    options = {"speculative_mode": "lookahead_decoding", "lookahead": "7,7,7"}
    options |= {"serve.max_attention_window_size": windows} if windows else {}
    prepare(BuildSpec(folder, tmp_path / "engine", "tensorrt", max_seq_len=128, options=options), says)


@pytest.mark.parametrize(("batch", "expected"), [(256, 256 * 84), (64, 8192)])
def test_draft_tokens_take_part_in_a_step(tmp_path, batch, expected):
    """1.2.1 builder.py, build: "New max_num_tokens is set to" max_batch_size * (max_draft_len + 1), if that is more.

    A draft of lookahead=7,7,7 has 83 tokens (examples/lookahead/README.md).
    """
    folder = str(write_checkpoint(tmp_path / "tiny", "llama"))
    options = {"speculative_mode": "lookahead_decoding", "lookahead": "7,7,7"}
    spec = BuildSpec(folder, tmp_path / "engine", "tensorrt", max_batch_size=batch, options=options)
    made = prepare(spec)
    assert made.argv[made.argv.index("--max_num_tokens") + 1] == str(expected)
    assert made.request.limits.max_num_tokens == expected
    short = BuildSpec(folder, tmp_path / "engine", "tensorrt", max_seq_len=84, options=options)
    prepare(short, "a draft has 83 tokens, which count towards --max-seq-len 84")


@pytest.mark.parametrize(
    ("flag", "value", "option"),
    [
        ("max_decoder_seq_len", "64", "--max-seq-len"),
        ("max_batch_size", "4", "--max-batch-size"),
        ("speculative_decoding_mode", "medusa", "--set speculative_mode"),
    ],
)
def test_a_flag_that_the_manifest_announces_has_an_option(tmp_path, flag, value, option):
    """The engine would have 4 sequences of 64 tokens, and gateways would send it more; or heads that nobody made."""
    folder = str(write_checkpoint(tmp_path / "tiny", "llama"))
    spec = BuildSpec(folder, tmp_path / "engine", "tensorrt", options={f"flag.{flag}": value})
    prepare(spec, f"because llmops sets it; use {option}")


@pytest.mark.parametrize(
    ("family", "version", "ignored"),
    [
        ("mistral", "1.2.1", True),
        ("mixtral", "1.2.1", True),
        ("mixtral", "1.3.0rc29", False),
        ("phi3", "1.2.1", True),
        ("phi3", "1.3.0rc29", True),
        ("qwen2", "1.3.0rc29", True),
        ("gemma3", "1.2.1", False),
    ],
)
def test_a_window_that_the_pytorch_backend_ignores_is_refused(tmp_path, family, version, ignored):
    """1.2.1's MistralAttention and MixtralAttention hand on no window; #12597 (2026-03-30, in 1.3) mended both.

    Phi3Attention and QwenAttention hand on none (_torch/models/modeling_phi3.py and modeling_qwen.py, as late as
    after 1.3.0rc29 for Qwen); Gemma3Attention always did.
    """
    windows = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
    folder = write_checkpoint(tmp_path / "tiny", family, **windows)
    image = {"image": "trtllm-1.3"} if version.startswith("1.3") else {}
    says = "only to the last 64 tokens.*--max-seq-len 64, or use --target tensorrt" if ignored else ""
    for length, refused_with in ((64, ""), (65, says)):
        spec = BuildSpec(str(folder), tmp_path / "engine", "pytorch", max_seq_len=length, options=image)
        prepare(spec, refused_with)
