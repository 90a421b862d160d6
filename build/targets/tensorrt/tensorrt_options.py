"""Translate `--set` of target tensorrt.

The settings become arguments of `trtllm-build` or parameters of the C++ backend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmops.build.checkpoint.lora_adapters import AdapterCheckpoint
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.spec import BuildSpec
from llmops.build.targets.nvidia import trtllm_build
from llmops.build.targets.nvidia.build_request import COMMON_OPTIONS, BuildRequest, positive_option
from llmops.build.trtllm.adapter_cache import Rows, cache_parameters
from llmops.build.trtllm.backend_files import MODULE_IDS, engine_modules
from llmops.build.trtllm.backend_parameters import checked_parameters
from llmops.build.trtllm.flag_rules import FlagContext, paged_context
from llmops.build.trtllm.trtllm_build_arguments import EngineOptions, build_arguments
from llmops.build.trtllm.trtllm_build_flags import Value, effective_flags, from_argv, to_argv
from llmops.errors import InputError

FLAG, SERVE = "flag.", "serve."
LOOKAHEAD, DRAFT_TOKENS = "lookahead_decoding", "draft_tokens_external"
# Families without lookahead. In 1.2.1 `tensorrt_llm/models/{gemma,phi3}/model.py`, `forward` takes
# no spec_decoding_params, which DecoderModelForCausalLM passes for lookahead (TypeError).
_NO_LOOKAHEAD = ("gemma2", "gemma3", "phi3")
#: Speculative modes for plain checkpoints. medusa, eagle and explicit_draft_tokens (ReDrafter) need
#: other architectures.
SPECULATIVE_MODES = (LOOKAHEAD, DRAFT_TOKENS)
#: Flags that also change what the engine folder announces -> the option that does both.
_OWN_FLAGS = {
    "max_batch_size": "--max-batch-size", "max_seq_len": "--max-seq-len", "max_num_tokens": "--max-num-tokens",
    "speculative_decoding_mode": "--set speculative_mode", "max_draft_len": "--set max_draft_len",
}  # fmt: skip
OPTIONS = COMMON_OPTIONS | {
    "max_input_len", "tokens_per_block", "workers", "adapters", "lora_modules", "max_lora_rank", "speculative_mode",
    "max_draft_len", "lookahead", "guided",
}  # fmt: skip


def with_draft_tokens(request: BuildRequest) -> BuildRequest:
    """Return the request with the max_num_tokens that an engine with draft tokens gets.

    trtllm-build raises a number that is too small for draft tokens (1.2.1
    `tensorrt_llm/builder.py`, build).

    Raises:
        InputError: A draft leaves no room for a prompt and an answer.
    """
    length = int(str(_speculative(request.spec).get("max_draft_len", 0)))
    limits = request.limits
    if limits.max_seq_len < length + 2:
        raise InputError(
            f"--set speculative_mode: a draft has {length} tokens, which count towards --max-seq-len "
            f"{limits.max_seq_len}; raise it."
        )
    tokens = max(limits.max_num_tokens, limits.max_batch_size * (length + 1))
    return replace(request, limits=limits.model_copy(update={"max_num_tokens": tokens}))


def serve_parameters(request: BuildRequest) -> dict[str, str]:
    """Return the C++ backend's parameters. `--set serve.NAME=VALUE` overrides the defaults.

    Raises:
        InputError: The backend does not have a parameter or value.
    """
    options = request.spec.options.items()
    given = checked_parameters({k.removeprefix(SERVE): v for k, v in options if k.startswith(SERVE)})
    return {**_attention_windows(request), **given}


def _attention_windows(request: BuildRequest) -> dict[str, str]:
    """Return the C++ backend's parameters for a model with sliding-window attention.

    An engine does not contain the windows: the runtime sets them, and by default no layer has a
    window (NVIDIA/TensorRT-LLM `examples/models/core/gemma/README.md`, --max_attention_window_size;
    a list that is shorter than the layers repeats). Before #10875, which 1.2.1 may not have, the
    reuse of a KV cache with several windows costs accuracy.
    """
    arch, length = request.checkpoint.architecture, request.limits.max_seq_len
    window = arch.sliding_window
    if window is None or window.size >= length:
        return {}
    sizes = [window.size if layer in window.layers else length for layer in range(arch.num_layers)]
    period = next(size for size in range(1, len(sizes) + 1) if sizes[size:] == sizes[:-size])
    repeated = {"max_attention_window_size": ",".join(map(str, sizes[:period]))}
    return repeated if len(set(sizes)) == 1 else {**repeated, "enable_kv_cache_reuse": "false"}


def engine_arguments(request: BuildRequest, adapters: list[AdapterCheckpoint]) -> list[str]:
    """Return `["trtllm-build", "--checkpoint_dir", …]` with paths relative to the engine folder.

    Raises:
        InputError: `trtllm-build` would not accept an argument.
    """
    spec = request.spec
    gpu = find_gpu(spec.gpu) if spec.gpu else None
    options = EngineOptions(
        subject=FlagContext(
            request.checkpoint.architecture.family,
            request.quant_format.name,
            spec.tp,
            spec.pp,
            request.kv_cache,
            gpu.sm if gpu else 0,
            gpu is not None and gpu.multicast,
        ),
        max_batch_size=request.limits.max_batch_size,
        max_input_len=max_input_len(request),
        max_seq_len=request.limits.max_seq_len,
        max_num_tokens=request.limits.max_num_tokens,
        tokens_per_block=positive_option(spec, "tokens_per_block", (spec.plan or {}).get("tokens_per_block", 32)),
        workers=positive_option(spec, "workers", spec.tp * spec.pp),
        features={**_lora(spec, adapters), **_speculative(spec)},
        extra=_extra_flags(spec),
    )
    return [
        trtllm_build.PROGRAM,
        *to_argv(build_arguments(options, trtllm_build.CHECKPOINT_DIR, trtllm_build.ENGINE_DIR)),
    ]


def max_input_len(request: BuildRequest) -> int:
    """Return the maximum length of a prompt in tokens: the maximum sequence length minus one.

    Without paged context FMHA, a prompt must also fit into one step.
    """
    longest = request.limits.max_seq_len - 1
    if not paged_context(request.quant_format.name, request.kv_cache):
        longest = min(longest, request.limits.max_num_tokens)
    return positive_option(request.spec, "max_input_len", longest)


def _lora(spec: BuildSpec, adapters: list[AdapterCheckpoint]) -> dict[str, Value]:
    """Return the flags for the given adapters, and for more adapters if the user sets them."""
    extra_modules = spec.options.get("lora_modules")
    if not adapters and extra_modules is None:
        return {}
    modules = engine_modules(adapters, str(extra_modules).split(",") if extra_modules else ())
    largest = max((adapter.rank for adapter in adapters), default=64)
    rank = positive_option(spec, "max_lora_rank", largest)
    if adapters and rank < largest:
        raise InputError(
            f"--set max_lora_rank={rank} is too small, because an adapter has rank {largest}; leave it out."
        )
    named: dict[str, Value] = {"lora_target_modules": modules} if modules else {}
    return {"lora_plugin": "auto", "max_lora_rank": rank, **named}


def _speculative(spec: BuildSpec) -> dict[str, Value]:
    mode = spec.options.get("speculative_mode")
    if mode is None:
        return {}
    if mode not in SPECULATIVE_MODES:
        raise InputError(
            f"--set speculative_mode={mode} needs draft heads in the checkpoint, which llmops does not make; use "
            f"{' or '.join(SPECULATIVE_MODES)}, or --target pytorch with llm.speculative_config."
        )
    sizes = lookahead_sizes(spec)
    length = 4 if sizes is None else lookahead_draft_len(*sizes)
    chosen = positive_option(spec, "max_draft_len", length)
    if sizes is not None and chosen != length:
        raise InputError(
            f"--set max_draft_len: lookahead={','.join(map(str, sizes))} has the draft length {length}; leave "
            "max_draft_len out."
        )
    return {"speculative_decoding_mode": str(mode), "max_draft_len": chosen}


def lookahead_sizes(spec: BuildSpec) -> list[int] | None:
    """Return (window, n-gram, verification set) of `--set lookahead=W,N,G`, or None in other modes."""
    if spec.options.get("speculative_mode") != LOOKAHEAD:
        return None
    text = str(spec.options.get("lookahead", ""))
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"--set lookahead={text} is not possible; give window, n-gram and verification set, as in 7,7,7."
        )
    return [int(part) for part in parts]


def lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    """Return the draft length of lookahead (NVIDIA/TensorRT-LLM examples/lookahead/README.md)."""
    return (0 if ngram == 1 else ngram - 2) + (window - 1 + verification) * (ngram - 1)


def _extra_flags(spec: BuildSpec) -> dict[str, Value]:
    flags = {name[len(FLAG) :]: str(value) for name, value in spec.options.items() if name.startswith(FLAG)}
    argv = [word for name, value in flags.items() for word in (f"--{name}", *value.split())]
    chosen = from_argv([word for word in argv if word != "true"])
    if own := next((name for name in chosen if name in _OWN_FLAGS), None):
        raise InputError(f"--set {FLAG}{own} is not possible, because llmops sets it; use {_OWN_FLAGS[own]}.")
    return chosen


def uses_paged_context(argv: list[str]) -> bool:
    """Return True if the engine reads its KV cache in pages during prefill.

    Reuse of the KV cache and chunked context need such an engine. The engine's config.json has the
    same value (`plugin_config.use_paged_context_fmha`).
    """
    return effective_flags(from_argv(argv[1:]))["use_paged_context_fmha"] == "enable"


def check_serving(parameters: dict[str, str], request: BuildRequest, argv: list[str]) -> None:
    """Raise InputError for parameters with which the engine would not load or answer wrongly.

    The conditions are NVIDIA's
    (`cpp/tensorrt_llm/batch_manager/trtGptModelInflightBatching.cpp`), except the scheduler policy,
    the families and the last condition; NVIDIA ignores reuse without paged context. The last
    condition is about pipeline stages: the backend's caches count the layers of a stage from 0
    (createKvCacheManager, groupLayersByWindowSize), and its attention counts them from the model's
    first layer (transformerBuffers.cpp). A layer gets the right window only if both counts agree.
    """
    requested = [name for name in ("enable_chunked_context", "enable_kv_cache_reuse") if parameters.get(name) == "true"]
    if requested and not uses_paged_context(argv):
        raise InputError(
            f"--set {SERVE}{requested[0]}=true needs paged context FMHA, which --kv-cache {request.kv_cache} with "
            f"--quant {request.quant_format.name} does not have; use --kv-cache auto, or --kv-cache fp8 with --quant "
            "fp8 or w4a8_awq."
        )
    if parameters.get("kv_cache_onboard_blocks") == "false" and uses_paged_context(argv):
        raise InputError(
            f"--set {SERVE}kv_cache_onboard_blocks=false is not possible: no engine with paged context FMHA loads "
            "with it; leave it out."
        )
    flags = effective_flags(from_argv(argv[1:]))
    chunked = parameters.get("enable_chunked_context") != "false" and uses_paged_context(argv)
    longest_prompt, length = int(str(flags["max_num_tokens"])), int(str(flags["max_seq_len"]))
    if parameters.get("batch_scheduler_policy") == "max_utilization" and not chunked and longest_prompt < length - 1:
        # A paused request starts again with prompt and answer so far in one step
        # (executor/executorImpl.cpp, fetchNewRequests; batch_manager/trtGptModel.h, mMaxInputLen).
        raise InputError(
            f"--set {SERVE}batch_scheduler_policy=max_utilization: without chunked context, streams of more than "
            f"{longest_prompt + 1} tokens, prompt and answer together, would be refused; leave it out."
        )
    if float(parameters.get("gpu_weights_percent") or 1) < 1 and not flags["weight_streaming"]:
        raise InputError(f"--set {SERVE}gpu_weights_percent below 1 needs --set {FLAG}weight_streaming=true.")
    mode = flags["speculative_decoding_mode"]
    # batch_manager/trtGptModelInflightBatching.cpp, getDecodingMode; `lookahead` loads with its sizes only.
    decoding = "lookahead" if mode == LOOKAHEAD else "top_k_top_p"
    if (parameters.get("decoding_mode") or decoding) != decoding:
        raise InputError(f"--set {SERVE}decoding_mode: this engine decodes by {decoding} only; leave it out.")
    if mode == DRAFT_TOKENS and parameters.get("enable_kv_cache_reuse") == "false":
        raise InputError(
            f"speculative_mode={DRAFT_TOKENS} needs reuse of the KV cache, which {SERVE}enable_kv_cache_reuse=false "
            "or a model with several attention windows turns off; leave it out."
        )
    if mode == LOOKAHEAD and request.checkpoint.architecture.family in _NO_LOOKAHEAD:
        raise InputError(
            f"speculative_mode={LOOKAHEAD} is not possible: trtllm-build does not have it for Gemma and Phi; leave "
            "it out."
        )
    windows = (parameters.get("max_attention_window_size") or "").split(",")
    if len(set(windows)) == 1:
        return
    if mode == LOOKAHEAD:
        raise InputError(
            f"speculative_mode={LOOKAHEAD} needs one attention window in all layers, not {','.join(windows)}; add "
            f"--max-seq-len {min(map(int, windows))}, or leave speculative_mode out."
        )
    stages = request.spec.pp
    if stages > 1 and request.checkpoint.architecture.num_layers // stages % len(windows):
        raise InputError(
            f"--pp {stages} is not possible: TensorRT-LLM would give layers the wrong attention window, unless each "
            f"stage has a multiple of {len(windows)} layers; use --tp."
        )


def adapter_cache(
    request: BuildRequest, argv: list[str], rows: Sequence[Rows], serve: Mapping[str, str]
) -> dict[str, str]:
    """Return the C++ backend's parameters with which all adapters fit into its adapter cache.

    Args:
        request: The build.
        argv: The command line of trtllm-build.
        rows: The rows of each adapter in the cache.
        serve: The serving parameters that the user set.
    """
    flags = from_argv(argv[1:])
    modules, spec = flags.get("lora_target_modules"), request.spec
    if not isinstance(modules, list) or not MODULE_IDS.keys() >= set(modules):
        return {}
    rank = int(str(flags.get("max_lora_rank", 64)))
    return cache_parameters(rows, request.checkpoint.architecture, (spec.tp, spec.pp), modules, rank, serve)


def check_adapters(request: BuildRequest) -> None:
    """Raise InputError for adapters if the engine is not in float16.

    The C++ backend reads `lora_prefetch_dir` from .npy files, which cannot hold bfloat16, and
    copies only into a cache of the same dtype (`runtime/utils/numpyUtils.cpp`,
    `runtime/loraCache.cpp`).
    """
    if request.spec.options.get("adapters") and request.dtype != "float16":
        raise InputError(
            "--adapter: NVIDIA's C++ backend loads adapters into float16 engines only, and this engine is "
            f"{request.dtype}; add --set dtype=float16, or use --target pytorch."
        )
