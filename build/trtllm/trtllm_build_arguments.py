"""Translate a build request to the arguments of `trtllm-build`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmops.build.quant_formats import FORMATS
from llmops.build.trtllm.flag_rules import USER_BUFFER_TP, FlagContext, check_arguments, flag_overrides
from llmops.build.trtllm.trtllm_build_flags import Value
from llmops.errors import InputError


@dataclass(frozen=True)
class EngineOptions:
    """The options of one `trtllm-build` run. Lengths are in tokens.

    `features` are the flags for LoRA adapters and speculative decoding. `extra` overrides any flag.
    """

    subject: FlagContext
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    tokens_per_block: int = 32
    workers: int = 1
    features: Mapping[str, Value] = field(default_factory=dict)
    extra: Mapping[str, Value] = field(default_factory=dict)


def build_arguments(options: EngineOptions, checkpoint_dir: str, output_dir: str) -> dict[str, Value]:
    """Return the checked arguments, with the value of every flag that the engine will have.

    Raises:
        InputError: TensorRT-LLM 1.2.1 would reject an argument, or silently change a flag that the
            user set.
    """
    arguments: dict[str, Value] = {
        "checkpoint_dir": checkpoint_dir,
        "output_dir": output_dir,
        "max_batch_size": options.max_batch_size,
        "max_input_len": options.max_input_len,
        "max_seq_len": options.max_seq_len,
        "max_num_tokens": options.max_num_tokens,
        "max_beam_width": 1,
        **_inflight_batching(options),
        **_plugins(options),
        **options.features,
        "workers": options.workers,
        **options.extra,
    }
    # --multiple_profiles and --opt_num_tokens exclude each other, so a user's --opt_num_tokens
    # turns the profiles off.
    if "opt_num_tokens" in options.extra and "multiple_profiles" not in options.extra:
        arguments["multiple_profiles"] = "disable"
    arguments = _settled(arguments, options)
    check_arguments(arguments, options.subject)
    return arguments


def _settled(arguments: dict[str, Value], options: EngineOptions) -> dict[str, Value]:
    for name, override in flag_overrides(arguments, options.subject).items():
        if name in options.extra:
            raise InputError(
                f"trtllm-build would change --{name} to {override.value}: {override.why}; leave --set flag.{name} out."
            )
        if name in arguments:
            arguments[name] = override.value
    return arguments


def _inflight_batching(options: EngineOptions) -> dict[str, Value]:
    return {
        "remove_input_padding": "enable",
        "kv_cache_type": "paged",
        "tokens_per_block": options.tokens_per_block,
        "context_fmha": "enable",
        "use_paged_context_fmha": "enable",
        "use_fp8_context_fmha": "enable" if options.subject.kv_cache == "fp8" else "disable",
        "multiple_profiles": "enable",
    }


def _plugins(options: EngineOptions) -> dict[str, Value]:
    """Return the plugin flags of the build.

    NVIDIA recommends the GEMM plugin for 16-bit GEMMs and not for FP8
    (performance-tuning-guide/useful-build-time-flags.md, fp8-quantization.md); the row-wise FP8
    GEMM exists only as a plugin.
    """
    subject = options.subject
    chosen: dict[str, Value] = {
        "gpt_attention_plugin": "auto",
        "gemm_plugin": "auto" if FORMATS[subject.quant].gemm_plugin else "disable",
    }
    if subject.quant == "fp8_pc_pt":
        chosen["fp8_rowwise_gemm_plugin"] = "auto"
    if subject.tp_size * subject.pp_size > 1:
        chosen["nccl_plugin"] = "auto"
    if subject.family == "mixtral":
        chosen["moe_plugin"] = "auto"
    # `reduce_fusion` and `user_buffer` let reduction, residual and norm run in one kernel
    # (performance-tuning-guide/useful-build-time-flags.md). For Gemma 2, a user can set
    # flag.reduce_fusion=enable. `user_buffer` makes the hidden states FP8, which the LoRA plugin
    # does not support, and needs GPUs with multicast.
    if subject.tp_size > 1 and subject.pp_size == 1 and subject.family == "llama" and subject.quant != "fp8_pc_pt":
        chosen["reduce_fusion"] = "enable"
        fits = subject.multicast and subject.tp_size <= USER_BUFFER_TP
        if subject.quant == "fp8" and fits and not options.features.get("lora_plugin"):
            chosen["user_buffer"] = "enable"
    return chosen
