"""The `trtllm-build` command line of TensorRT-LLM 1.2.1 as a table.

The checks do not need TensorRT-LLM.

Sources: NVIDIA/TensorRT-LLM `tensorrt_llm/commands/build.py` and `tensorrt_llm/plugin/plugin.py`.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llmops.errors import InputError

Kind = Literal["int", "word", "path", "paths", "words", "present"]
Value = int | str | bool | Sequence[str]

DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
SWITCH = ("enable", "disable")
LORA_MODULES = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate", "cross_attn_qkv",
    "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense", "moe_h_to_4h", "moe_4h_to_h", "moe_gate",
    "moe_router", "mlp_router", "mlp_gate_up",
)  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """A flag of `trtllm-build`. The kind `present` takes no value, and `words` one or more.

    A `default` of None means that the flag is not set. `minimum` is the smallest value of an int.
    """

    name: str
    kind: Kind
    default: Value | None = None
    choices: tuple[str, ...] = ()
    minimum: int = 0


def _ints(**defaults: int | None) -> list[Flag]:
    return [Flag(name, "int", default, minimum=0 if default == 0 else 1) for name, default in defaults.items()]


def _words(choices: tuple[str, ...], **defaults: str | None) -> list[Flag]:
    return [Flag(name, "word", default, choices) for name, default in defaults.items()]


def _present(*names: str) -> list[Flag]:
    return [Flag(name, "present", False) for name in names]


_CORE = [
    *(Flag(name, "path") for name in ("checkpoint_dir", "model_config", "build_config", "model_cls_file")),
    Flag("output_dir", "path", "engine_outputs"),
    Flag("model_cls_name", "word"),
    *_ints(max_batch_size=2048, max_input_len=1024, max_seq_len=None, max_beam_width=1, max_num_tokens=8192),
    *_ints(opt_num_tokens=None, max_encoder_input_len=1024, max_prompt_embedding_table_size=0, workers=1),
    *_words(("continuous", "paged", "disabled"), kv_cache_type=None),
    Flag("input_timing_cache", "path"),
    Flag("output_timing_cache", "path", "model.cache"),
    *_words(("layer_names_only", "detailed", "none"), profiling_verbosity="layer_names_only"),
    *_present("strip_plan", "weight_sparsity", "weight_streaming", "fast_build", "enable_debug_output", "dry_run"),
    *_present("monitor_memory", "gather_context_logits", "gather_generation_logits", "gather_all_token_logits"),
    *_words(("internal_error", "error", "warning", "info", "verbose", "debug", "trace"), log_level="info"),
    Flag("visualize_network", "path"),
    *_words(("float16", "float32"), logits_dtype=None),
    Flag("lora_dir", "paths"),
    *_words(("hf", "nemo"), lora_ckpt_source="hf"),
    Flag("lora_target_modules", "words", None, LORA_MODULES),
    *_ints(max_lora_rank=64, max_draft_len=0),
    *_words(
        ("draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"),
        speculative_decoding_mode=None,
    ),
]

_PLUGINS = [
    *_words((*DTYPES, "fp8", "nvfp4"), gemm_plugin=None),
    *_words(DTYPES, gpt_attention_plugin="auto", bert_attention_plugin="auto", nccl_plugin="auto", moe_plugin="auto"),
    *_words(DTYPES, mamba_conv1d_plugin="auto", lora_plugin="disable", fp8_rowwise_gemm_plugin="disable"),
    *_words(("fp8", "disable"), gemm_swiglu_plugin="disable", low_latency_gemm_plugin="disable"),
    *_words(("fp8", "disable"), low_latency_gemm_swiglu_plugin="disable"),
    *_words(("float16", "bfloat16", "disable"), gemm_allreduce_plugin="disable"),
    *_words(SWITCH, context_fmha="enable", remove_input_padding="enable", use_paged_context_fmha="enable"),
    *_words(SWITCH, use_fp8_context_fmha="enable", paged_state="enable", use_fused_mlp="enable"),
    *_words(SWITCH, dora_plugin="disable", bert_context_fmha_fp32_acc="disable", fuse_fp4_quant="disable"),
    *_words(SWITCH, multiple_profiles="disable", streamingllm="disable", norm_quant_fusion="disable"),
    *_words(SWITCH, reduce_fusion="disable", user_buffer="disable", pp_reduce_scatter="disable"),
    *_ints(tokens_per_block=32),
]

FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*_CORE, *_PLUGINS)}
ALIASES = {"max_decoder_seq_len": "max_seq_len", "max_multimodal_len": "max_prompt_embedding_table_size"}


def check_flag(name: str, value: Value) -> None:
    """Raise InputError unless `trtllm-build` 1.2.1 accepts `--name value`."""
    flag = FLAGS.get(ALIASES.get(name, name))
    if flag is None:
        near = difflib.get_close_matches(name, FLAGS, n=1)
        hint = f"; did you mean --{near[0]}?" if near else "; docs/tensorrt-llm.md lists its flags."
        raise InputError(f"trtllm-build 1.2.1 has no flag --{name}{hint}")
    if flag.kind == "present":
        _expect(isinstance(value, bool), flag, value, "the flag without a value")
    elif flag.kind == "int":
        whole = isinstance(value, int) and not isinstance(value, bool)
        _expect(whole and int(value) >= flag.minimum, flag, value, f"a whole number of at least {flag.minimum}")  # type: ignore[arg-type]
    elif flag.kind in ("paths", "words"):
        items = [] if isinstance(value, (str, int)) else list(value)
        fits = all(not flag.choices or item in flag.choices for item in items)
        _expect(bool(items) and fits, flag, value, _one_of(flag))
    else:
        fits = isinstance(value, str) and bool(value) and (not flag.choices or value in flag.choices)
        _expect(fits, flag, value, _one_of(flag))


def _one_of(flag: Flag) -> str:
    return f"one of {', '.join(flag.choices)}" if flag.choices else "a text that is not empty"


def _expect(fits: bool, flag: Flag, value: Value, expected: str) -> None:
    if not fits:
        raise InputError(f"trtllm-build --{flag.name} {value} is not possible; give {expected}.")


def effective_flags(arguments: Mapping[str, Value]) -> dict[str, Value | None]:
    """Return the value of every flag: the given value, or the default, None if it has no default."""
    values = {ALIASES.get(name, name): value for name, value in arguments.items()}
    return {name: values.get(name, flag.default) for name, flag in FLAGS.items()}


def to_argv(arguments: Mapping[str, Value]) -> list[str]:
    """Return `["--max_batch_size", "64", …]` in the given order.

    A flag of kind `present` is left out if it is False.
    """
    argv: list[str] = []
    for name, value in arguments.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not False:
            values = [str(value)] if isinstance(value, (str, int)) else [str(item) for item in value]
            argv += [f"--{name}", *values]
    return argv


def from_argv(argv: Sequence[str]) -> dict[str, Value]:
    """Parse the result of `to_argv`. The form `--name=value` is accepted too.

    Raises:
        InputError: A flag is unknown, or has a wrong value.
    """
    arguments: dict[str, Value] = {}
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        name = words.pop(0).removeprefix("--")
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        arguments[ALIASES.get(name, name)] = _typed(name, values)
    for name, value in arguments.items():
        check_flag(name, value)
    return arguments


def _typed(name: str, values: list[str]) -> Value:
    flag = FLAGS.get(ALIASES.get(name, name))
    if flag is not None and flag.kind in ("paths", "words"):
        return values
    if flag is not None and flag.kind == "present":
        return not values or values[0]
    value = " ".join(values)
    return int(value) if flag is not None and flag.kind == "int" and value.isdecimal() else value
