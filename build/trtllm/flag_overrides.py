"""What the builder of TensorRT-LLM 1.2.1 makes of the plugin configuration: some combinations it switches off with a
warning among thousands of lines, and the engine that comes out refuses to load hours later.

Source: NVIDIA/TensorRT-LLM `tensorrt_llm/builder.py` (build), in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmops.build.quant_formats import FORMATS
from llmops.build.trtllm.trtllm_build_flags import Value, effective_flags

# the algorithms that compute attention over the prompt in FP8: FP8 and W4A8_AWQ (NVFP4 is not made here)
FP8_ATTENTION = frozenset(name for name, form in FORMATS.items() if form.fp8_attention)
# LlamaForCausalLM and Gemma2ForCausalLM (and Medusa, which is not made here)
REDUCE_FUSION = frozenset({"llama", "gemma2"})
Flags = Mapping[str, Value | None]


@dataclass(frozen=True)
class FlagContext:
    """What is being built: `family`, `quant` and `kv_cache` in llmops' names."""

    family: str
    quant: str
    tp_size: int = 1
    pp_size: int = 1
    kv_cache: str = "auto"


@dataclass(frozen=True)
class FlagOverride:
    """Where `when` holds the builder sets `flag` to `value`, whatever was asked for; `why` as the end of a sentence."""

    flag: str
    value: str
    when: Callable[[Flags, FlagContext], bool]
    why: str


def _on(flags: Flags, name: str) -> bool:
    return flags[name] == "enable"


_NARROW = f"--quant {' or '.join(sorted(FP8_ATTENTION))}"
OVERRIDES = (
    FlagOverride("reduce_fusion", "disable", lambda f, s: s.tp_size == 1 or s.family not in REDUCE_FUSION,
             "it is for Llama and Gemma 2 on several GPUs of tensor parallelism"),
    FlagOverride("user_buffer", "disable", lambda f, s: not _on(f, "reduce_fusion"), "it needs reduce_fusion"),
    FlagOverride("norm_quant_fusion", "disable", lambda f, s: True, "it is for NVFP4 models"),
    FlagOverride("use_fp8_context_fmha", "disable", lambda f, s: not _on(f, "context_fmha"), "it needs context_fmha"),
    FlagOverride("use_paged_context_fmha", "disable", lambda f, s: not _on(f, "context_fmha"), "it needs context_fmha"),
    FlagOverride("use_fp8_context_fmha", "disable", lambda f, s: s.quant not in FP8_ATTENTION,
             f"it needs {_NARROW}"),
    FlagOverride("use_paged_context_fmha", "disable", lambda f, s: s.kv_cache == "fp8" and s.quant not in FP8_ATTENTION,
             f"an FP8 KV cache needs {_NARROW}"),
    FlagOverride("use_fp8_context_fmha", "disable",
             lambda f, s: _on(f, "use_paged_context_fmha") and s.kv_cache != "fp8", "it needs --kv-cache fp8"),
    FlagOverride("use_fp8_context_fmha", "enable",
             lambda f, s: _on(f, "use_paged_context_fmha") and s.kv_cache == "fp8", "an FP8 KV cache needs it"),
    FlagOverride("use_paged_context_fmha", "disable", lambda f, s: s.kv_cache == "int8",
             "an INT8 KV cache cannot be read in pages"),
)  # fmt: skip


def flag_overrides(arguments: Mapping[str, Value], subject: FlagContext) -> dict[str, FlagOverride]:
    """The last change to each flag that would not come out as asked for, by flag."""
    asked = effective_flags(arguments)
    flags, changed = dict(asked), {}
    for override in OVERRIDES:
        if flags[override.flag] != override.value and override.when(flags, subject):
            flags[override.flag] = override.value
            changed[override.flag] = override
    return {name: override for name, override in changed.items() if flags[name] != asked[name]}


def paged_context(quant: str, kv_cache: str) -> bool:
    """Whether an engine can read its KV cache in pages while it takes a prompt: reuse and chunked context need it."""
    return "use_paged_context_fmha" not in flag_overrides({}, FlagContext("llama", quant, kv_cache=kv_cache))
