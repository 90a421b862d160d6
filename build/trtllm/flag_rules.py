"""Rules of `trtllm-build` flags in TensorRT-LLM 1.2.1.

The rules cover combinations that `trtllm-build` rejects, and flags that it changes silently.

A `FlagOverride` is a flag that the builder changes, with a warning among thousands of lines; the
engine may fail to load hours later. Source: NVIDIA/TensorRT-LLM `tensorrt_llm/builder.py` (build),
in its order. A `FlagRule` is a combination that the program rejects after it has loaded weights for
minutes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmops.build.quant_formats import FORMATS
from llmops.build.trtllm.trtllm_build_flags import Value, check_flag, effective_flags
from llmops.errors import InputError

#: Formats that can compute attention over the prompt in FP8.
FP8_ATTENTION = frozenset(name for name, quant_format in FORMATS.items() if quant_format.fp8_attention)
#: Families with reduce fusion: LlamaForCausalLM and Gemma2ForCausalLM. llmops makes no Medusa.
REDUCE_FUSION = frozenset({"llama", "gemma2"})
#: The most GPUs of tensor parallelism on one machine, which --user_buffer needs.
USER_BUFFER_TP = 8
Flags = Mapping[str, Value | None]


@dataclass(frozen=True)
class FlagContext:
    """The build for which flags are checked.

    `family`, `quant` and `kv_cache` have llmops' names.

    `sm` is the compute capability of --gpu, or 0 without --gpu. `multicast` is True if the GPUs of
    --gpu can write to all GPUs of a machine at once.
    """

    family: str
    quant: str
    tp_size: int = 1
    pp_size: int = 1
    kv_cache: str = "auto"
    sm: int = 0
    multicast: bool = False


@dataclass(frozen=True)
class FlagOverride:
    """A flag that the builder sets to `value` if `when` is True, against the user's value.

    `why` is the reason, as the end of a sentence.
    """

    flag: str
    value: str
    when: Callable[[Flags, FlagContext], bool]
    why: str


def _enabled(flags: Flags, name: str) -> bool:
    return flags[name] == "enable"


_NARROW = f"--quant {' or '.join(sorted(FP8_ATTENTION))}"
OVERRIDES = (
    FlagOverride("reduce_fusion", "disable", lambda f, s: s.tp_size == 1 or s.family not in REDUCE_FUSION,
             "it is for Llama and Gemma 2 on several GPUs of tensor parallelism"),
    FlagOverride("user_buffer", "disable", lambda f, s: not _enabled(f, "reduce_fusion"), "it needs reduce_fusion"),
    FlagOverride("norm_quant_fusion", "disable", lambda f, s: True, "it is for NVFP4 models"),
    FlagOverride("use_fp8_context_fmha", "disable", lambda f, s: not _enabled(f, "context_fmha"),
        "it needs context_fmha"),
    FlagOverride("use_paged_context_fmha", "disable", lambda f, s: not _enabled(f, "context_fmha"),
        "it needs context_fmha"),
    FlagOverride("use_fp8_context_fmha", "disable", lambda f, s: s.quant not in FP8_ATTENTION,
             f"it needs {_NARROW}"),
    FlagOverride("use_paged_context_fmha", "disable", lambda f, s: s.kv_cache == "fp8" and s.quant not in FP8_ATTENTION,
             f"an FP8 KV cache needs {_NARROW}"),
    FlagOverride("use_fp8_context_fmha", "disable",
             lambda f, s: _enabled(f, "use_paged_context_fmha") and s.kv_cache != "fp8", "it needs --kv-cache fp8"),
    FlagOverride("use_fp8_context_fmha", "enable",
             lambda f, s: _enabled(f, "use_paged_context_fmha") and s.kv_cache == "fp8", "an FP8 KV cache needs it"),
    FlagOverride("use_paged_context_fmha", "disable", lambda f, s: s.kv_cache == "int8",
             "an INT8 KV cache cannot be read in pages"),
)  # fmt: skip


def flag_overrides(arguments: Mapping[str, Value], subject: FlagContext) -> dict[str, FlagOverride]:
    """Return the last override of each flag that changes the requested value, by flag."""
    requested = effective_flags(arguments)
    flags, changed = dict(requested), {}
    for override in OVERRIDES:
        if flags[override.flag] != override.value and override.when(flags, subject):
            flags[override.flag] = override.value
            changed[override.flag] = override
    return {name: override for name, override in changed.items() if flags[name] != requested[name]}


def paged_context(quant: str, kv_cache: str) -> bool:
    """Return True if an engine can read its KV cache in pages during prefill.

    Reuse of the KV cache and chunked context need such an engine.
    """
    return "use_paged_context_fmha" not in flag_overrides({}, FlagContext("llama", quant, kv_cache=kv_cache))


@dataclass(frozen=True)
class FlagRule:
    """A rule that `trtllm-build` enforces.

    `broken` returns True if the effective flags break the rule. `sentence` has the problem and the
    remedy.
    """

    broken: Callable[[dict[str, Value | None], FlagContext], bool]
    sentence: str


def _on(flags: Mapping[str, Value | None], name: str) -> bool:
    return flags[name] not in (None, "disable", False, 0)


def _used(*names: str) -> Callable[[dict[str, Value | None], FlagContext], bool]:
    return lambda flags, _: all(_on(flags, name) for name in names)


def _without(name: str, needed: str) -> Callable[[dict[str, Value | None], FlagContext], bool]:
    return lambda flags, _: _on(flags, name) and not _on(flags, needed)


def _unpaged(flags: Mapping[str, Value | None]) -> bool:
    return not _on(flags, "use_paged_context_fmha")


_NOT_ON_B200 = (
    "gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin", "bert_context_fmha_fp32_acc",
)  # fmt: skip
RULES = [
    FlagRule(_used("opt_num_tokens", "multiple_profiles"),
         "--opt_num_tokens cannot go with --multiple_profiles enable: drop one of them."),
    FlagRule(_used("gather_context_logits", "max_draft_len"),
         "--gather_context_logits cannot go with --max_draft_len: drop one of them."),
    FlagRule(_used("streamingllm"),
         "--streamingllm enable is no longer supported by TensorRT-LLM 1.2: leave it out."),
    FlagRule(_without("user_buffer", "reduce_fusion"),
         "--user_buffer enable needs --reduce_fusion enable."),
    FlagRule(lambda f, s: _on(f, "user_buffer") and not (s.quant == "fp8" and s.family == "llama"),
         "--user_buffer enable is for FP8 models of the Llama family: leave it out."),
    # Elsewhere, the server ends at start or at the first request: userbuffers-host.cpp shares the
    # buffers through files of one machine, and the kernels of userbuffers.cu need multicast (#2817).
    FlagRule(lambda f, s: _on(f, "user_buffer") and (s.tp_size > USER_BUFFER_TP or (s.sm > 0 and not s.multicast)),
         f"--user_buffer enable is for at most {USER_BUFFER_TP} GPUs of one machine that NVLink joins, such as H100 "
         "SXM: leave it out."),
    # In quantization/layers.py, Fp8RowwiseGatedMLP.forward takes no all_reduce_params, which
    # LLaMADecoderLayer passes, and asserts that no adapter is used, like Fp8RowwiseAttention.
    FlagRule(lambda f, s: _on(f, "reduce_fusion") and s.quant == "fp8_pc_pt",
         "--reduce_fusion enable is not for --quant fp8_pc_pt: leave it out."),
    FlagRule(lambda f, s: _on(f, "lora_plugin") and s.quant == "fp8_pc_pt",
         "engines of --quant fp8_pc_pt take no adapters: use --quant fp8, or --target pytorch."),
    # Source: loraPlugin.cpp, which counts one token per request in generation and ends the process
    # with "LoraParams and input dims don't match".
    FlagRule(lambda f, s: _on(f, "lora_plugin") and f["speculative_decoding_mode"] == "lookahead_decoding",
         "engines of lookahead_decoding take no adapters: leave one of the two out."),
    # Source: layers/mlp.py, FusedGatedMLP.fc_gate_plugin.
    FlagRule(lambda f, s: _on(f, "lora_plugin") and any(_on(f, n) for n in (
         "gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin")),
         "--gemm_swiglu_plugin and --low_latency_gemm_swiglu_plugin take no adapters: leave them out."),
    # Source: PluginConfig.validate of tensorrt_llm/plugin/plugin.py. targets/nvidia/gpu_checks.py
    # checks the formats.
    FlagRule(lambda f, s: s.sm == 100 and any(_on(f, name) for name in _NOT_ON_B200),
         f"a B200 has no {', '.join(f'--{name}' for name in _NOT_ON_B200)}: leave them out."),
    FlagRule(_used("user_buffer", "pp_reduce_scatter"),
         "--user_buffer cannot go with --pp_reduce_scatter: drop one of them."),
    FlagRule(lambda f, s: _on(f, "pp_reduce_scatter") and s.family != "mixtral",
         "--pp_reduce_scatter enable is for Mixtral: leave it out."),
    # Source: cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArray: "tokensPerBlock must be power
    # of 2".
    FlagRule(lambda f, s: int(f["tokens_per_block"]).bit_count() != 1,  # type: ignore[arg-type]
         "--tokens_per_block must be a power of two, such as 32."),
    FlagRule(_without("use_paged_context_fmha", "context_fmha"),
         "--use_paged_context_fmha enable needs --context_fmha enable."),
    # Source: cpp/include/tensorrt_llm/runtime/modelConfig.h, supportsInflightBatching; without KV
    # cache, an answer has one token. Only trtllm-refit gives a stripped engine its weights.
    FlagRule(lambda f, s: f["kv_cache_type"] not in (None, "paged") or not _on(f, "gpt_attention_plugin"),
         "in-flight batching needs --kv_cache_type paged and --gpt_attention_plugin: keep the defaults of both."),
    FlagRule(_used("strip_plan"),
         "--strip_plan leaves the weights out of the engine, which cannot be served: leave it out."),
    FlagRule(lambda f, s: f["kv_cache_type"] in (None, "paged") and not _on(f, "remove_input_padding"),
         "in-flight batching needs --remove_input_padding enable (packed input)."),
    FlagRule(_used("gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin"),
         "--gemm_swiglu_plugin and --low_latency_gemm_swiglu_plugin exclude each other: keep one."),
    FlagRule(lambda f, s: not _on(f, "use_fused_mlp") and any(_on(f, n) for n in (
         "gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin")),
         "--gemm_swiglu_plugin and --low_latency_gemm_swiglu_plugin need --use_fused_mlp enable."),
    FlagRule(_used("gemm_plugin", "low_latency_gemm_plugin"),
         "--low_latency_gemm_plugin needs --gemm_plugin disable."),
    FlagRule(lambda f, s: s.quant != "fp8" and any(_on(f, n) for n in (
         "gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin")),
         "the FP8 GEMM plugins (gemm_swiglu, low_latency_gemm, low_latency_gemm_swiglu) need --quant fp8."),
    FlagRule(lambda f, s: _on(f, "fp8_rowwise_gemm_plugin") != (s.quant == "fp8_pc_pt"),
         "--quant fp8_pc_pt and --fp8_rowwise_gemm_plugin go together: set both or neither."),
    FlagRule(lambda f, s: not _on(f,
        "lora_plugin") and (f["lora_dir"] is not None or f["lora_target_modules"] is not None),
         "--lora_dir and --lora_target_modules need --lora_plugin auto."),
    FlagRule(lambda f, s: _on(f, "max_draft_len") and f["speculative_decoding_mode"] is None,
         "--max_draft_len needs --speculative_decoding_mode."),
    FlagRule(lambda f, s: f["speculative_decoding_mode"] == "draft_tokens_external" and _unpaged(f),
         "draft_tokens_external reuses the KV cache, which needs --use_paged_context_fmha enable: choose another "
         "--kv-cache or --quant."),
    FlagRule(lambda f, s: _unpaged(f) and int(f["max_input_len"]) > int(f["max_num_tokens"]),  # type: ignore[arg-type]
         "--max_input_len is longer than --max_num_tokens, and without paged context FMHA a prompt is taken in one "
         "step: lower it."),
    FlagRule(lambda f, s: isinstance(f["max_seq_len"], int) and int(f["max_input_len"]) > f["max_seq_len"],  # type: ignore[arg-type]
         "--max_input_len is longer than --max_seq_len: lower it."),
    FlagRule(lambda f, s: int(f["max_num_tokens"]) < int(f["max_batch_size"]),  # type: ignore[arg-type]
         "--max_num_tokens is smaller than --max_batch_size, so a full batch cannot take one step: raise it."),
]  # fmt: skip


def check_arguments(arguments: Mapping[str, Value], subject: FlagContext) -> None:
    """Raise InputError for the first fault that `trtllm-build` 1.2.1 would reject.

    A fault is an unknown flag, a wrong value or a combination.
    """
    for name, value in arguments.items():
        check_flag(name, value)
    flags = effective_flags(arguments)
    if (subject.tp_size > 1 or subject.pp_size > 1) and not _on(flags, "nccl_plugin"):
        raise InputError("trtllm-build --nccl_plugin disable: engines for more than one GPU need it; leave it at auto.")
    for rule in RULES:
        if rule.broken(flags, subject):
            raise InputError(f"trtllm-build: {rule.sentence}")
