"""The frozen arguments of `tensorrt_llm.LLM(...)`: made from a request, checked against the field table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llmops.build.manifest import Limits
from llmops.build.trtllm.llm_fields import TABLES, TOP, Field, Table
from llmops.build.trtllm.versions import release
from llmops.errors import InputError

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list, tuple),
    "dict": (Mapping,), "config": (Mapping,),
}  # fmt: skip
_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)


@dataclass(frozen=True)
class Parallel:
    """GPUs; `ep` spreads experts over the tensor-parallel ones."""

    tp: int
    pp: int
    ep: int
    moe: bool


@dataclass(frozen=True)
class Serving:
    """What a plan decides about serving. `kv_cache_fraction`: of the GPU memory that the weights leave free."""

    kv_cache_fraction: float = 0.9
    chunked_prefill: bool = True
    tokens_per_block: int = 32

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any] | None) -> Serving:
        """From a BuildPlan as a dict; what it leaves out keeps its default."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in (plan or {}).items() if name in known})


def make_llm_args(
    limits: Limits,
    parallel: Parallel,
    kv_cache: str,
    overrides: Mapping[str, Any],
    version: str,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """Arguments without `model` and `tokenizer`, which the serving side fills in. `overrides` win over the plan.
    Raises InputError."""
    serving = serving or Serving()
    arguments: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": parallel.tp,
        "pipeline_parallel_size": parallel.pp,
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "kv_cache_config": {
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": serving.kv_cache_fraction,
            "tokens_per_block": serving.tokens_per_block,
            "dtype": kv_cache,
        },
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": _graph_sizes(limits.max_batch_size)},
        "enable_chunked_prefill": serving.chunked_prefill,
        "guided_decoding_backend": "xgrammar",
        "skip_tokenizer_init": False,
        "enable_iter_perf_stats": True,
    }
    if parallel.moe:
        arguments["moe_expert_parallel_size"] = parallel.ep
        arguments["moe_tensor_parallel_size"] = parallel.tp // parallel.ep
    for path, value in overrides.items():
        _set(arguments, path, value)
    check_llm_args(arguments, version)
    return arguments


def _graph_sizes(max_batch_size: int) -> list[int]:
    sizes = [size for size in _GRAPH_SIZES if size < max_batch_size]
    return [*sizes, max_batch_size]


def _set(arguments: dict[str, Any], path: str, value: Any) -> None:
    """`kv_cache_config.host_cache_size` reaches into the nested dict; None takes a key out."""
    *parents, last = path.split(".")
    for parent in parents:
        arguments = arguments.setdefault(parent, {})
        if not isinstance(arguments, dict):
            raise InputError(f"--set llm.{path}: {parent} is not a group of fields.")
    if value is None:
        arguments.pop(last, None)
    else:
        arguments[last] = value


def check_llm_args(arguments: Mapping[str, Any], version: str) -> None:
    """Raise InputError for the first key or value that TensorRT-LLM `version` would not take."""
    minor = release(version)
    _check_table(arguments, TOP, minor, "")
    _check_rules(arguments)


def _check_table(values: Mapping[str, Any], table: Table, minor: tuple[int, int], prefix: str) -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        field = table.get(name)
        if field is None:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"it has {', '.join(sorted(table)[:6])}, …"
            raise InputError(f"the LLM API of TensorRT-LLM has no field {path}; {hint}")
        if minor < field.since or (field.until is not None and minor >= field.until):
            raise InputError(f"the LLM API of TensorRT-LLM {minor[0]}.{minor[1]} has no field {path}; leave it out.")
        if value is not None:
            _check_value(path, value, field, minor)


def _check_value(path: str, value: Any, field: Field, minor: tuple[int, int]) -> None:
    wanted: Any = _TYPES[field.kind]  # Any: a tuple of types would narrow `value` to object
    if not isinstance(value, wanted) or (isinstance(value, bool) and field.kind != "bool"):
        raise InputError(f"{path} is {value!r}; the LLM API wants {field.kind}.")
    if field.config is not None:
        _check_table(value, TABLES[field.config], minor, f"{path}.")
    if field.choices:
        known = [c.lower() for c in field.choices] if field.any_case else list(field.choices)
        if (value.lower() if field.any_case else value) not in known:
            raise InputError(f"{path} is {value!r}; the LLM API takes {', '.join(field.choices)}.")
    too_small = field.minimum is not None and value < field.minimum
    if too_small or (field.maximum is not None and value > field.maximum):
        least = field.minimum if field.minimum is not None else "-∞"
        most = field.maximum if field.maximum is not None else "∞"
        raise InputError(f"{path} is {value!r}; it must lie between {least} and {most}.")


def _check_rules(arguments: Mapping[str, Any]) -> None:
    """What the validators of the library refuse, or quietly change."""
    windows = (arguments.get("kv_cache_config") or {}).get("max_attention_window")
    if windows is not None and (not windows or any(not isinstance(w, int) or w < 1 for w in windows)):
        raise InputError("kv_cache_config.max_attention_window must be a list of whole numbers of at least 1.")
    speculative = arguments.get("speculative_config") or {}
    kind = str(speculative.get("decoding_type", "")).lower()
    if kind in ("eagle", "eagle3", "draft_target") and not (
        speculative.get("max_draft_len")
        and (speculative.get("speculative_model_dir") or speculative.get("speculative_model"))
    ):
        raise InputError(f"speculative_config {speculative['decoding_type']} needs max_draft_len and a draft model.")
    graphs = arguments.get("cuda_graph_config") or {}
    sizes = graphs.get("batch_sizes")
    if sizes and graphs.get("max_batch_size") and max(sizes) != graphs["max_batch_size"]:
        raise InputError("cuda_graph_config.max_batch_size must be the largest of batch_sizes; give one of the two.")
    if arguments.get("lora_config") and not arguments.get("enable_lora", True):
        raise InputError("lora_config needs enable_lora true.")
