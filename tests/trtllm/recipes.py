"""Published `trtllm-build` recipes of NVIDIA/TensorRT-LLM's documentation (flags only; `source` is the page).

`published` are the flags of the page that say something about the engine (not where files lie). `differs` are flags in
which llmops chooses otherwise on purpose, each with its reason.
"""

from dataclasses import dataclass, field
from typing import Any

LLAMA = "examples/models/core/llama/README.md"
MIXTRAL = "examples/models/core/mixtral/README.md"
QWEN = "examples/models/core/qwen/README.md"
GEMMA = "examples/models/core/gemma/README.md"
FP8_GUIDE = "docs/source/legacy/performance/performance-tuning-guide/fp8-quantization.md"
FLAGS_GUIDE = "docs/source/legacy/performance/performance-tuning-guide/useful-build-time-flags.md"

NO_GEMM = {"gemm_plugin": "the FP8 guide advises against the GEMM plugin for FP8"}


@dataclass(frozen=True)
class Recipe:
    """One model, precision and parallelism with the flags that its page gives."""

    name: str
    source: str
    family: str
    quant: str
    published: dict[str, Any]
    tp: int = 1
    pp: int = 1
    asked: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)


RECIPES = [
    Recipe("llama-7b-fp16", LLAMA, "llama", "none", {"gemm_plugin": "auto"}),
    Recipe("llama-7b-int8-weight-only", LLAMA, "llama", "int8_wo", {"gemm_plugin": "auto"}),
    Recipe("llama-3-70b-fp16-tp8", LLAMA, "llama", "none", {"gemm_plugin": "auto"}, tp=8),
    Recipe("llama-3-70b-fp16-tp4-pp2", LLAMA, "llama", "none", {"gemm_plugin": "auto"}, tp=4, pp=2),
    Recipe(
        "llama-3-70b-1m-context-tp8", LLAMA, "llama", "none",
        {"gemm_plugin": "float16", "max_num_tokens": 4096, "max_batch_size": 1, "max_seq_len": 1048576,
         "use_paged_context_fmha": "enable", "workers": 8},
        tp=8, asked={"max_num_tokens": 4096, "max_batch_size": 1, "max_seq_len": 1048576},
        differs={"gemm_plugin": "auto takes the model's dtype, float16 here"},
    ),
    Recipe("llama-70b-fp8-tp2", LLAMA, "llama", "fp8", {"gemm_plugin": "auto", "workers": 2}, tp=2, differs=NO_GEMM),
    Recipe("llama-7b-int4-awq", LLAMA, "llama", "int4_awq", {"gemm_plugin": "auto"}),
    Recipe("llama-7b-smoothquant", LLAMA, "llama", "int8_sq", {"gemm_plugin": "auto"}),
    Recipe(
        "llama-3.1-405b-fp8-rowwise-tp8", LLAMA, "llama", "fp8_pc_pt",
        {"max_num_tokens": 4096, "max_input_len": 64000, "max_seq_len": 65000, "use_paged_context_fmha": "enable",
         "workers": 8},
        tp=8, asked={"max_num_tokens": 4096, "max_input_len": 64000, "max_seq_len": 65000},
    ),
    Recipe(
        "llama-7b-int4-awq-lora", LLAMA, "llama", "int4_awq",
        {"gemm_plugin": "auto", "lora_plugin": "auto", "max_batch_size": 8, "max_input_len": 512, "max_seq_len": 562,
         "lora_dir": ["luotuo-lora-7b-0.1/", "Japanese-Alpaca-LoRA-7b-v0/"], "max_lora_rank": 8,
         "lora_target_modules": ["attn_q", "attn_k", "attn_v"]},
        asked={"max_batch_size": 8, "max_input_len": 512, "max_seq_len": 562,
               "lora": (["luotuo-lora-7b-0.1/", "Japanese-Alpaca-LoRA-7b-v0/"], 8, ["attn_q", "attn_k", "attn_v"])},
    ),
    Recipe("mixtral-8x7b-fp8-tp2", MIXTRAL, "mixtral", "fp8", {"workers": 2}, tp=2),
    Recipe("mixtral-8x7b-int8-weight-only-tp2", MIXTRAL, "mixtral", "int8_wo", {"gemm_plugin": "float16"}, tp=2,
           differs={"gemm_plugin": "auto takes the model's dtype, float16 here"}),
    Recipe("qwen-72b-fp16-tp8", QWEN, "qwen2", "none", {"gemm_plugin": "float16"}, tp=8,
           differs={"gemm_plugin": "auto takes the model's dtype, float16 here"}),
    Recipe("gemma-2b-bf16", GEMMA, "gemma2", "none",
           {"gemm_plugin": "auto", "max_batch_size": 8, "max_input_len": 3000, "max_seq_len": 3100},
           asked={"max_batch_size": 8, "max_input_len": 3000, "max_seq_len": 3100}),
    Recipe("llama-3.3-70b-fp8-tp4-tuned", FP8_GUIDE, "llama", "fp8",
           {"max_num_tokens": 16384, "max_batch_size": 512, "use_paged_context_fmha": "enable",
            "multiple_profiles": "enable", "reduce_fusion": "enable", "user_buffer": "enable"},
           tp=4, asked={"max_num_tokens": 16384, "max_batch_size": 512}),
    Recipe("llama-3.3-70b-fp16-tp4-tuned", FLAGS_GUIDE, "llama", "none",
           {"multiple_profiles": "enable", "use_paged_context_fmha": "enable", "gemm_plugin": "auto",
            "reduce_fusion": "enable"}, tp=4),
]  # fmt: skip
