"""The frozen arguments of `tensorrt_llm.LLM(...)`.

The arguments are made from a build request, and checked against the table of fields.

An engine keeps the arguments under the newest release's names, and `arguments_for_release`
translates them for a release.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from llmops.build.engine_folder.manifest import EngineLimits, Parallelism
from llmops.build.trtllm.image_selection import release_of
from llmops.build.trtllm.llm_fields import DECODING_TYPES, SPECULATIVE, TABLES, TOP, Field, Table, owners
from llmops.errors import InputError

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list, tuple),
    "dict": (Mapping,), "config": (Mapping,), "bool or auto": (bool, str), "dict or path": (Mapping, str),
}  # fmt: skip
#: Fields of processes that make text of tokens. Gateways do this for llmops, and the processes would
#: send an answer whole for each of its tokens (executor/postproc_worker.py, _handle_input).
_TEXT_PROCESSES = ("num_postprocess_workers", "postprocess_tokenizer_dir")
#: Speculations that may run inside the model -> the field of 1.2 that switches this off. Eagle is
#: the name of Eagle3 in 1.2.
_ONE_MODEL = {"MTP": "mtp_eagle_one_model", "Eagle3": "eagle3_one_model", "Eagle": "eagle3_one_model"}
#: The longest match, in tokens, in the pool of all requests (`SADecodingConfig`).
_MAX_POOLED_MATCH = 64
#: Short flags of `trtllm-serve` (1.2.1 `commands/serve.py`) -> the fields that they set.
_SERVE_FLAGS = {
    "tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size", "cp_size": "context_parallel_size",
    "ep_size": "moe_expert_parallel_size", "cluster_size": "moe_cluster_parallel_size",
}  # fmt: skip
#: Speculations that run inside the model in 1.3, with a KV cache of the drafts.
_DRAFTS_WITH_CACHE = ("Eagle3", "MTP", "PARD", "DFlash", "DSpark", "Draft_Target")
_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)


class FieldError(InputError):
    """An error for a field or a value that a release does not accept.

    `path` is the dotted name of the field.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def make_llm_args(
    limits: EngineLimits,
    parallel: Parallelism,
    kv_cache: str,
    overrides: Mapping[str, Any],
    version: str,
    *,
    is_mixture: bool = False,
    plan: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of an engine, without `model` and `tokenizer`.

    The serving side adds both. `overrides` take precedence over `plan`, a BuildPlan as a dict.
    `is_mixture` is True if the model has experts.

    Raises:
        InputError: `version` would not accept a field or value.
    """
    planned = {"kv_cache_fraction": 0.9, "chunked_prefill": True, "tokens_per_block": 32, **(plan or {})}
    arguments: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": parallel.tp_size,
        "pipeline_parallel_size": parallel.pp_size,
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "kv_cache_config": {
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": planned["kv_cache_fraction"],
            "tokens_per_block": planned["tokens_per_block"],
            "dtype": kv_cache,
        },
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": _graph_sizes(limits.max_batch_size)},
        "enable_chunked_prefill": planned["chunked_prefill"],
        "guided_decoding_backend": "xgrammar",
        "skip_tokenizer_init": False,
    }
    if is_mixture:
        arguments["moe_expert_parallel_size"] = parallel.ep_size
        arguments["moe_tensor_parallel_size"] = parallel.tp_size // parallel.ep_size
    # If the maximum batch size of graphs is set, the library itself chooses the batch sizes.
    if overrides.get("cuda_graph_config.max_batch_size"):
        del arguments["cuda_graph_config"]["batch_sizes"]
    for path, value in overrides.items():
        _set(arguments, path, value)
    check_llm_args(arguments, version)
    return release_neutral(arguments)


def _graph_sizes(max_batch_size: int) -> list[int]:
    sizes = [size for size in _GRAPH_SIZES if size < max_batch_size]
    return [*sizes, max_batch_size]


def _set(arguments: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted field such as `kv_cache_config.host_cache_size`. None removes the field.

    None for cuda_graph_config stays: it turns off the graphs that the library makes by default
    (`TorchLlmArgs.cuda_graph_config`).
    """
    *parents, last = path.split(".")
    for parent in parents:
        arguments = arguments.setdefault(parent, {})
        if not isinstance(arguments, dict):
            raise InputError(f"--set llm.{path} is not possible: {parent} is not a group of fields; leave it out.")
    if value is None and path != "cuda_graph_config":
        arguments.pop(last, None)
    else:
        arguments[last] = value


def release_neutral(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments under the names that an engine keeps, without processes that make text.

    Releases have different names for speculation types and the draft model. An unknown type stays,
    and `arguments_for_release` rejects it.
    """
    translated = {name: value for name, value in arguments.items() if name not in _TEXT_PROCESSES}
    speculative = translated.get("speculative_config")
    if isinstance(speculative, Mapping):
        translated["speculative_config"] = _neutral_speculation(dict(speculative))
    return translated


def _neutral_speculation(speculative: dict[str, Any]) -> dict[str, Any]:
    if "speculative_model_dir" in speculative:
        speculative.setdefault("speculative_model", speculative.pop("speculative_model_dir"))
    name = speculative.get("decoding_type")
    if name is not None:
        names = {_normalised(known): known for known in DECODING_TYPES} | {"eagle": "Eagle3"}
        speculative["decoding_type"] = names.get(_normalised(str(name)), name)
    # 1.3 accepts the older field of MTP with a warning, and reads both names as the newer field.
    if speculative.get("decoding_type") == "MTP" and "num_nextn_predict_layers" in speculative:
        layers = speculative["num_nextn_predict_layers"]
        if speculative.setdefault("max_draft_len", layers) == layers:
            del speculative["num_nextn_predict_layers"]
    return speculative


def _normalised(name: str) -> str:
    return name.replace("_", "").lower()


def arguments_for_release(arguments: Mapping[str, Any], minor: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments for the LLM API of a minor release.

    Raises:
        InputError: The release does not have a field or value.
    """
    translated = {
        name: value
        for name, value in release_neutral(arguments).items()
        if not _removed_without_loss(TOP.get(name), minor)
    }
    for name, field in TOP.items():
        if field.config is not None and isinstance(translated.get(name), Mapping):
            table = TABLES[field.config]
            translated[name] = {
                k: v
                for k, v in translated[name].items()
                # A null leaves the default, as `--set llm.GROUP.FIELD=null` does.
                if not (v is None and k in table) and not _removed_without_loss(table.get(k), minor)
            }
    _check_table(translated, TOP, minor, "")
    _check_rules({name: value for name, value in translated.items() if value is not None}, minor)
    if translated.get("speculative_config"):
        translated["speculative_config"] = _speculation_of(translated["speculative_config"], minor)
    return translated


def _removed_without_loss(field: Field | None, minor: tuple[int, int]) -> bool:
    """Return True if the release has removed the field, and lost no function with it."""
    return field is not None and field.until is not None and minor >= field.until and bool(field.gone)


def _speculation_of(neutral_form: Mapping[str, Any], minor: tuple[int, int]) -> dict[str, Any]:
    translated = dict(neutral_form)
    if minor >= (1, 3):
        return translated
    name = DECODING_TYPES[translated["decoding_type"]]
    translated["decoding_type"] = name
    if name == "NGram":
        # The default of 1.2 is 0, with which n-gram speculation never finds a match.
        translated.setdefault("max_matching_ngram_size", 2)
    if name == "MTP" and "max_draft_len" in translated:
        # from_dict of 1.2 overwrites max_draft_len with num_nextn_predict_layers, whose default is
        # 1.
        translated["num_nextn_predict_layers"] = translated.pop("max_draft_len")
    return translated


def is_one_model(speculative: Mapping[str, Any]) -> bool:
    """Return True if 1.2 speculates inside the model, which has its own sampler, with these settings."""
    switch = _ONE_MODEL.get(speculative.get("decoding_type", ""))
    return switch is not None and speculative.get(switch) is not False


def check_llm_args(arguments: Mapping[str, Any], version: str) -> None:
    """Raise InputError for the first key or value that TensorRT-LLM `version` would reject."""
    arguments_for_release(arguments, release_of(version))


def _check_table(values: Mapping[str, Any], table: Table, minor: tuple[int, int], prefix: str) -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        field = table.get(name)
        if field is None:
            meant = _meant(name, table, prefix)
            hint = f"did you mean {meant}?" if meant else f"it has {', '.join(sorted(table)[:6])}, …"
            raise FieldError(path, f"the LLM API of TensorRT-LLM has no field {path}; {hint}")
        if minor < field.since or (field.until is not None and minor >= field.until):
            instead = _instead(name, table, minor)
            raise FieldError(
                path, f"the LLM API of TensorRT-LLM {minor[0]}.{minor[1]} has no field {path}; {instead}leave it out."
            )
        if value is not None:
            _check_value(path, value, field, minor)


def _meant(name: str, table: Table, prefix: str) -> str:
    """Return the path of the field that an unknown name probably means, or an empty text.

    A name outside the groups may be a flag of `trtllm-serve`, or a field of a group, with or
    without the name of the group, such as `kv_cache_free_gpu_memory_fraction`.
    """
    if not prefix:
        if name in _SERVE_FLAGS:
            return _SERVE_FLAGS[name]
        paths = [
            f"{group}.{inner}"
            for group, field in TOP.items()
            for inner in (name.removeprefix(group.removesuffix("config")), name)
            if field.config is not None and inner in TABLES[field.config]
        ]
        # The shortest path is the one that the name of a group completes: `moe_backend` is
        # moe_config.backend rather than speculative_config.moe_backend.
        if paths:
            return min(paths, key=len)
    near = difflib.get_close_matches(name, table, n=1)
    return f"{prefix}{near[0]}" if near else ""


def _instead(name: str, table: Table, minor: tuple[int, int]) -> str:
    """Return advice to use a field of this release with a similar name, or an empty text."""
    available = [
        one for one, field in table.items() if minor >= field.since and (not field.until or minor < field.until)
    ]
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.75)
    return f"use {near[0]}, or " if near else ""


def _check_value(path: str, value: Any, field: Field, minor: tuple[int, int]) -> None:
    # With a tuple of types, mypy would narrow `value` to object.
    expected: Any = _TYPES[field.kind]
    unlike_auto = field.kind == "bool or auto" and isinstance(value, str) and value != "auto"
    if not isinstance(value, expected) or unlike_auto or (isinstance(value, bool) and bool not in expected):
        raise FieldError(path, f"{path} is {value!r}; the LLM API wants {field.kind}.")
    if field.config is not None:
        _check_table(value, TABLES[field.config], minor, f"{path}.")
    choices = field.choices_of(minor)
    if choices and (value.lower() if field.any_case else value) not in {
        c.lower() if field.any_case else c for c in choices
    }:
        raise FieldError(path, f"{path} is {value!r}; the LLM API takes {', '.join(choices)}.")
    too_small = field.minimum is not None and value < field.minimum
    if too_small or (field.maximum is not None and value > field.maximum):
        minimum = field.minimum if field.minimum is not None else "-∞"
        maximum = field.maximum if field.maximum is not None else "∞"
        raise FieldError(path, f"{path} is {value!r}; it must lie between {minimum} and {maximum}.")


def _check_rules(arguments: Mapping[str, Any], minor: tuple[int, int]) -> None:
    """Raise InputError for combinations that the library's validators reject or silently change."""
    cache = arguments.get("kv_cache_config") or {}
    # 1.2 kvCacheManager.cpp, "streamLLM is not supported at the moment"; 1.3 `KvCacheConfig`, "ignored"
    if cache.get("sink_token_length"):
        raise InputError("TensorRT-LLM has no sink tokens; leave kv_cache_config.sink_token_length out.")
    if cache.get("disk_cache_size") and not cache.get("disk_cache_path"):
        raise InputError("kv_cache_config.disk_cache_size needs disk_cache_path, a folder of the serving machine.")
    # _torch/pyexecutor/resource_manager.py, "must be smaller than 1.0"
    if cache.get("free_gpu_memory_fraction") == 1:
        raise InputError("kv_cache_config.free_gpu_memory_fraction must be below 1 for an engine to start; try 0.9.")
    windows = cache.get("max_attention_window")
    if windows is not None and (not windows or any(not isinstance(w, int) or w < 1 for w in windows)):
        raise InputError("kv_cache_config.max_attention_window must be a list of whole numbers of at least 1.")
    tokens = cache.get("tokens_per_block")
    # The block arrays of the default attention need a power of two
    # (cpp/tensorrt_llm/kernels/kvCacheUtils.h).
    if tokens and tokens.bit_count() != 1 and arguments.get("attn_backend", "TRTLLM") == "TRTLLM":
        raise InputError(f"kv_cache_config.tokens_per_block is {tokens}; it must be a power of two, such as 32.")
    speculative = arguments.get("speculative_config") or {}
    _check_speculation(speculative, minor, arguments.get("max_batch_size", TOP["max_batch_size"].default))
    if speculative and arguments.get("pipeline_parallel_size", 1) > 1:
        _check_stages(speculative, minor)
    # Each request must have this width (`_torch/pyexecutor/py_executor.py`, _validate_request).
    if arguments.get("max_beam_width", 1) != 1:
        raise InputError(
            "With max_beam_width above 1, TensorRT-LLM refuses requests without beam search; leave it out."
        )
    if arguments.get("sampler_type") == "TRTLLMSampler":
        kind = speculative.get("decoding_type")
        if kind in ("MTP", "Eagle3"):
            raise InputError(f"TensorRT-LLM starts no engine of {kind} with TRTLLMSampler; leave llm.sampler_type out.")
    if arguments.get("kv_connector_config") is not None:
        _check_connector(arguments, minor)
    if arguments.get("attn_backend", "TRTLLM") != "TRTLLM":
        _check_attention_backend(arguments, minor)
    # _torch/pyexecutor/py_executor_creator.py, get_guided_decoding_config
    if arguments.get("skip_tokenizer_init") and arguments.get("guided_decoding_backend"):
        raise InputError(
            "TensorRT-LLM's grammars need a tokenizer; leave llm.skip_tokenizer_init out, or add "
            "--set llm.guided_decoding_backend=null."
        )
    if speculative.get("use_rejection_sampling"):
        _check_rejection_sampling(arguments, speculative)
    if arguments.get("guided_decoding_backend") and minor >= (1, 3):
        _check_grammars(speculative)
    compiled = arguments.get("torch_compile_config") is not None
    lora = arguments.get("enable_lora") or arguments.get("lora_config") is not None
    if arguments.get("prefill_cuda_graph_backend") == "breakable" and (compiled or lora):
        raise InputError(
            "TensorRT-LLM starts no engine of LoRA adapters or with torch_compile_config if "
            "prefill_cuda_graph_backend is breakable; leave llm.prefill_cuda_graph_backend out."
        )
    if lora and speculative and minor < (1, 3):
        # cpp/tensorrt_llm/thop/loraOp.cpp counts one token per request in generation (#12617).
        raise InputError(
            "With speculation, TensorRT-LLM before 1.3 ends every request of an adapter; add --set image=trtllm-1.3, "
            "or leave llm.speculative_config or the adapters out."
        )
    _check_piecewise(arguments)
    graphs = arguments.get("cuda_graph_config") or {}
    sizes = graphs.get("batch_sizes")
    if sizes and not all(isinstance(size, int) for size in sizes):
        raise InputError("cuda_graph_config.batch_sizes must be a list of whole numbers.")
    # 1.2 compares batch_sizes with its own list (TorchLlmArgs.validate_cuda_graph_config).
    if sizes and graphs.get("max_batch_size") and (minor < (1, 3) or max(sizes) != graphs["max_batch_size"]):
        raise InputError("cuda_graph_config.max_batch_size and batch_sizes contradict each other; give one of the two.")
    if minor < (1, 3) and arguments.get("max_stats_len") == -1:
        raise FieldError("max_stats_len", "max_stats_len -1 keeps one entry before TensorRT-LLM 1.3; give a number.")
    if arguments.get("orchestrator_type", "rpc") != "rpc" or arguments.get("ray_worker_extension_cls"):
        raise InputError("NVIDIA's images have no Ray; leave orchestrator_type and ray_worker_extension_cls out.")
    if arguments.get("lora_config") and not arguments.get("enable_lora", True):
        raise InputError("lora_config needs enable_lora true; set it, or leave lora_config out.")


def _check_piecewise(arguments: Mapping[str, Any]) -> None:
    """Raise InputError where the older fields of piecewise graphs contradict those of 1.3.

    Source: `TorchLlmArgs.normalize_prefill_cuda_graph_config`.
    """
    compiled, tokens = arguments.get("torch_compile_config") or {}, arguments.get("prefill_capture_num_tokens")
    disabled = arguments.get("prefill_cuda_graph_backend") == "disabled"
    older = compiled.get("capture_num_tokens")
    different = set(map(str, older or [])) != set(map(str, tokens or []))
    for name, newer, conflict in (
        ("enable_piecewise_cuda_graph", "prefill_cuda_graph_backend", disabled),
        ("capture_num_tokens", "prefill_capture_num_tokens", older and tokens and different),
    ):
        if compiled.get(name) and conflict:
            raise InputError(f"torch_compile_config.{name} contradicts {newer}; leave one of the two out.")


def _check_connector(arguments: Mapping[str, Any], minor: tuple[int, int]) -> None:
    """Raise InputError for settings with which an engine that has a KV cache connector does not start.

    Sources: `_torch/pyexecutor/py_executor_creator.py` (policy, speculation) and `py_executor.py`,
    _maybe_init_kv_connector_manager, which refuses more in 1.3 (1.3.0rc29,
    features/kv-cache-connector, "A page slot must not be reassigned"). Windows: kvCacheManager.cpp,
    "not supported with multiple window sizes"; 1.3's newer manager has them (the same page,
    "Running under VSWA").
    """
    connector, parts = arguments["kv_connector_config"], ("module", "scheduler_class", "worker_class")
    if not connector.get("connector") and not all(connector.get(f"connector_{part}") for part in parts):
        raise InputError(
            "kv_connector_config needs connector_module, connector_scheduler_class and connector_worker_class, or "
            "from TensorRT-LLM 1.3 on connector."
        )
    cache, scheduler = arguments.get("kv_cache_config") or {}, arguments.get("scheduler_config") or {}
    policy = "GUARANTEED_NO_EVICT"
    conflicts = {
        "pipeline_parallel_size": arguments.get("pipeline_parallel_size", 1) > 1,
        "speculative_config": arguments.get("speculative_config"),
        f"scheduler_config.capacity_scheduler_policy other than {policy}": (
            scheduler.get("capacity_scheduler_policy", policy) != policy
        ),
        "several windows in kv_cache_config.max_attention_window": (
            _has_windows(cache) and (minor < (1, 3) or cache.get("use_kv_cache_manager_v2") is False)
        ),
    }
    if minor >= (1, 3):
        conflicts |= {
            "context_parallel_size": arguments.get("context_parallel_size", 1) > 1,
            "enable_attention_dp": arguments.get("enable_attention_dp"),
            "kv_cache_config.host_cache_size": cache.get("host_cache_size"),
            "kv_cache_config.disk_cache_size": cache.get("disk_cache_size"),
        }
    if found := [name for name, is_set in conflicts.items() if is_set]:
        raise InputError(f"TensorRT-LLM has no kv_connector_config with {found[0]}; leave one of the two out.")


def _has_windows(cache: Mapping[str, Any]) -> bool:
    """Return True if the layers get KV caches with different attention windows."""
    return len(set(cache.get("max_attention_window") or ())) > 1


def _check_attention_backend(arguments: Mapping[str, Any], minor: tuple[int, int]) -> None:
    """Raise InputError for what the attention backends FLASHINFER and VANILLA do not have.

    Sources: windows: NVIDIA/TensorRT-LLM #15692, "layer_idx or window_size must be provided for
    VSWA"; the others: `_torch/pyexecutor/py_executor_creator.py`. Reuse: 1.2 turns it off with
    FLASHINFER ("Disabling block reuse for"), and with VANILLA makes blocks of max_num_tokens
    tokens. Speculation: 1.3 before #19466, "only when the draft model shares the target KV cache".
    """
    backend, cache = arguments["attn_backend"], arguments.get("kv_cache_config") or {}
    kind = (arguments.get("speculative_config") or {}).get("decoding_type")
    if _has_windows(cache):
        conflict = "several windows in kv_cache_config.max_attention_window"
    elif minor >= (1, 3) and backend == "FLASHINFER" and kind in _DRAFTS_WITH_CACHE:
        conflict = f"speculation by {kind}"
    elif minor < (1, 3) and cache.get("enable_block_reuse", True):
        raise InputError(
            f"TensorRT-LLM 1.2 cannot reuse blocks of the KV cache with attn_backend {backend}; leave it out, or add "
            "--set llm.kv_cache_config.enable_block_reuse=false."
        )
    else:
        return
    raise InputError(f"TensorRT-LLM has no attn_backend {backend} with {conflict}; leave one of the two out.")


def _check_speculation(speculative: Mapping[str, Any], minor: tuple[int, int], batch: int) -> None:
    kind = speculative.get("decoding_type")
    if speculative and kind is None:
        types = SPECULATIVE["decoding_type"].choices_of(minor)
        raise InputError(f"speculative_config needs decoding_type; set one of {', '.join(types)}.")
    if kind in ("Eagle3", "Draft_Target", "PARD", "DFlash") and not (
        speculative.get("max_draft_len") and speculative.get("speculative_model")
    ):
        raise InputError(f"speculative_config {kind} needs max_draft_len and speculative_model, a draft model.")
    if kind in ("NGram", "SA", "DSpark") and not speculative.get("max_draft_len"):
        raise InputError(f"speculative_config {kind} needs max_draft_len.")
    if kind == "MTP" and (speculative.get("max_draft_len") == 0 or "num_nextn_predict_layers" in speculative):
        raise InputError("speculative_config MTP needs max_draft_len of at least 1 and no num_nextn_predict_layers.")
    if kind == "DSpark" and speculative.get("block_size") not in (None, speculative["max_draft_len"]):
        raise InputError("speculative_config DSpark needs block_size equal to max_draft_len; leave block_size out.")
    least, size = (-1 if kind == "SA" else 1), speculative.get("max_matching_ngram_size")
    pooled = speculative.get("enable_global_pool")
    if size is not None and (size < least or size == 0 or (pooled and size > _MAX_POOLED_MATCH)):
        raise InputError(f"speculative_config.max_matching_ngram_size of {kind} must not be {size}; leave it out.")
    pool = speculative.get("global_pool_size")
    if pool is not None and not (pool >= batch and pooled):
        raise InputError(
            f"speculative_config.global_pool_size needs at least the maximum batch size, {batch}, and "
            "enable_global_pool true; leave it out."
        )
    if kind == "SaveState" and not (
        speculative.get("output_directory") and (speculative.get("eagle3_layers_to_capture") or minor >= (1, 3))
    ):
        raise InputError("speculative_config SaveState needs output_directory and eagle3_layers_to_capture.")
    for name in speculative:
        takers = owners(name, minor)
        if takers and kind not in takers:
            path = f"speculative_config.{name}"
            raise FieldError(path, f"{path} is for decoding_type {' or '.join(takers)}, not {kind}; leave it out.")
    if speculative.get("use_dynamic_tree"):
        longest, width = speculative.get("max_draft_len"), speculative.get("dynamic_tree_max_topK")
        if not longest or not width:
            raise InputError(
                "speculative_config.use_dynamic_tree needs max_draft_len and dynamic_tree_max_topK, such as 4."
            )
        total = speculative.get("max_total_draft_tokens", longest)
        if minor >= (1, 3) and not longest <= total <= longest * width:
            raise InputError(
                f"speculative_config.max_total_draft_tokens is {total}; a tree of max_draft_len {longest} and "
                f"dynamic_tree_max_topK {width} has between {longest} and {longest * width}."
            )
    _check_schedule(speculative, minor)


def _check_stages(speculative: Mapping[str, Any], minor: tuple[int, int]) -> None:
    """Raise InputError for speculation that a release does not have over several pipeline stages.

    A drafter outside the model ends the start (`_torch/pyexecutor/py_executor.py`, "Drafting is not
    supported for selected executor loop"). The feature-combination-matrix of 1.2.1 and of 1.3.0rc29
    has no speculation over stages at all, but 1.2's own tests run MTP so.
    """
    if minor >= (1, 3) or not is_one_model(speculative) or speculative["decoding_type"] != "MTP":
        raise InputError(
            f"TensorRT-LLM {minor[0]}.{minor[1]} has no {speculative['decoding_type']} speculation over pipeline "
            "stages; use --tp instead of --pp, or leave llm.speculative_config out."
        )


def _check_rejection_sampling(arguments: Mapping[str, Any], speculative: Mapping[str, Any]) -> None:
    """Raise InputError for what rejection sampling of drafts does not go with in 1.3.

    Source: `TorchLlmArgs.validate_speculative_config`. A tree may have 32 siblings, as many as the
    kernel records.
    """
    kind = speculative["decoding_type"]
    newer = kind not in ("Eagle3", "MTP") or speculative.get("use_mtp_vanilla")
    conflicts = {
        f"speculation by {kind}": kind not in _DRAFTS_WITH_CACHE,
        "sa_config": speculative.get("sa_config") is not None,
        "dynamic_tree_max_topK above 32": (
            speculative.get("use_dynamic_tree") and speculative.get("dynamic_tree_max_topK", 0) > 32
        ),
        "use_relaxed_acceptance_for_thinking": newer and speculative.get("use_relaxed_acceptance_for_thinking"),
        "context_parallel_size": newer and arguments.get("context_parallel_size", 1) > 1,
    }
    if found := [name for name, is_set in conflicts.items() if is_set]:
        raise InputError(f"TensorRT-LLM has no use_rejection_sampling with {found[0]}; leave one of the two out.")


def _check_grammars(speculative: Mapping[str, Any]) -> None:
    """Raise InputError for speculation with which 1.3 does not start an engine that has grammars."""
    kind = speculative.get("decoding_type")
    rejects = speculative.get("use_rejection_sampling")
    if kind == "SaveState" or (rejects and (kind not in ("Eagle3", "MTP") or speculative.get("use_mtp_vanilla"))):
        what = "use_rejection_sampling" if rejects else "SaveState"
        raise InputError(
            f"TensorRT-LLM 1.3 starts no engine of {kind} with {what} and grammars; "
            f"add --set llm.guided_decoding_backend=null, or leave {what} out."
        )


def _check_schedule(speculative: Mapping[str, Any], minor: tuple[int, int]) -> None:
    """Raise FieldError for a limit of draft tokens that a release ignores or reads differently.

    1.2 reads the keys of a schedule as the smallest batch size of each length. 1.3 reads them as
    the largest, and stops speculation above them (NVIDIA/TensorRT-LLM #10860). The same change
    added these limits to speculation inside the model.
    """
    schedule, path = speculative.get("draft_len_schedule"), "speculative_config.draft_len_schedule"
    if schedule and minor >= (1, 3):
        raise FieldError(path, f"{path} has another meaning in 1.3 than in 1.2; use max_concurrency, or leave it out.")
    for name in ("draft_len_schedule", "max_concurrency"):
        if speculative.get(name) and minor < (1, 3) and is_one_model(speculative):
            path = f"speculative_config.{name}"
            raise FieldError(
                path,
                f"{path} does nothing before TensorRT-LLM 1.3 with speculation inside the model; "
                f"leave it out, or set {_ONE_MODEL[speculative['decoding_type']]} to false.",
            )
    if schedule:
        lengths = {str(size): length for size, length in schedule.items()}
        longest = speculative.get("max_draft_len", lengths.get("1"))
        fits = isinstance(longest, int) and lengths.get("1") == longest
        if not fits or any(not size.isdecimal() or n not in range(longest + 1) for size, n in lengths.items()):
            raise FieldError(
                path,
                f"{path} is {schedule!r}; it must map the smallest batch size of each draft length to this length, "
                "and 1 to max_draft_len, the largest.",
            )
