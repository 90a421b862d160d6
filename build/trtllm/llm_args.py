"""The frozen arguments of `tensorrt_llm.LLM(...)`: made from a request, checked against the field table.

An engine keeps them neutral, in the newest release's names; each release gets its own from `arguments_for_release`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llmops.build.engine_folder.manifest import EngineLimits
from llmops.build.trtllm.image_selection import release_of
from llmops.build.trtllm.llm_fields import DECODING_TYPES, SPECULATIVE, TABLES, TOP, Field, Table
from llmops.errors import InputError

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list, tuple),
    "dict": (Mapping,), "config": (Mapping,), "switch": (bool, str),
}  # fmt: skip
_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)


class FieldError(InputError):
    """A field, or its value, that a release does not take; `path` is its dotted name."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class LlmParallelism:
    """GPUs; `ep` spreads experts over the tensor-parallel ones."""

    tp: int
    pp: int
    ep: int
    moe: bool


@dataclass(frozen=True)
class ServingOptions:
    """What a plan decides about serving. `kv_cache_fraction`: of the GPU memory that the weights leave free."""

    kv_cache_fraction: float = 0.9
    chunked_prefill: bool = True
    tokens_per_block: int = 32

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any] | None) -> ServingOptions:
        """From a BuildPlan as a dict; what it leaves out keeps its default."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in (plan or {}).items() if name in known})


def make_llm_args(
    limits: EngineLimits,
    parallel: LlmParallelism,
    kv_cache: str,
    overrides: Mapping[str, Any],
    version: str,
    serving: ServingOptions | None = None,
) -> dict[str, Any]:
    """Neutral arguments without `model` and `tokenizer`, which the serving side fills in. `overrides` win over the
    plan. Raises InputError for what `version` would not take."""
    serving = serving or ServingOptions()
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
    }
    if parallel.moe:
        arguments["moe_expert_parallel_size"] = parallel.ep
        arguments["moe_tensor_parallel_size"] = parallel.tp // parallel.ep
    for path, value in overrides.items():
        _set(arguments, path, value)
    check_llm_args(arguments, version)
    return release_neutral(arguments)


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


def release_neutral(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in the names that an engine keeps: speculation's types and draft model are called differently by
    different releases. A type that none has stays as it is, for `arguments_for_release` to refuse."""
    made = dict(arguments)
    speculative = made.get("speculative_config")
    if isinstance(speculative, Mapping):
        made["speculative_config"] = _neutral_speculation(dict(speculative))
    return made


def _neutral_speculation(given: dict[str, Any]) -> dict[str, Any]:
    if "speculative_model_dir" in given:
        given.setdefault("speculative_model", given.pop("speculative_model_dir"))
    name = given.get("decoding_type")
    if name is not None:
        names = {_plain(known): known for known in DECODING_TYPES} | {"eagle": "Eagle3"}
        given["decoding_type"] = names.get(_plain(str(name)), name)
    return given


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def arguments_for_release(arguments: Mapping[str, Any], minor: tuple[int, int]) -> dict[str, Any]:
    """What a minor release of the LLM API is called with. Raises InputError for what it does not have."""
    made = {name: value for name, value in release_neutral(arguments).items() if not _harmless(TOP.get(name), minor)}
    for name, field in TOP.items():
        if field.config is not None and isinstance(made.get(name), Mapping):
            table = TABLES[field.config]
            made[name] = {k: v for k, v in made[name].items() if not _harmless(table.get(k), minor)}
    _check_table(made, TOP, minor, "")
    _check_rules(made, minor)
    if made.get("speculative_config"):
        made["speculative_config"] = _speculation_of(made["speculative_config"], minor)
    return made


def _harmless(field: Field | None, minor: tuple[int, int]) -> bool:
    """Gone by then, and nothing is lost with it."""
    return field is not None and field.until is not None and minor >= field.until and bool(field.gone)


def _speculation_of(neutral_form: Mapping[str, Any], minor: tuple[int, int]) -> dict[str, Any]:
    made = dict(neutral_form)
    if minor >= (1, 3):
        return made
    name = DECODING_TYPES[made["decoding_type"]]
    made["decoding_type"] = name
    if name == "NGram":
        # 1.2's own default of 0 never finds a match
        made.setdefault("max_matching_ngram_size", 2)
    return made


def check_llm_args(arguments: Mapping[str, Any], version: str) -> None:
    """Raise InputError for the first key or value that TensorRT-LLM `version` would not take."""
    arguments_for_release(arguments, release_of(version))


def _check_table(values: Mapping[str, Any], table: Table, minor: tuple[int, int], prefix: str) -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        field = table.get(name)
        if field is None:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"it has {', '.join(sorted(table)[:6])}, …"
            raise FieldError(path, f"the LLM API of TensorRT-LLM has no field {path}; {hint}")
        if minor < field.since or (field.until is not None and minor >= field.until):
            instead = _instead(name, table, minor)
            raise FieldError(
                path, f"the LLM API of TensorRT-LLM {minor[0]}.{minor[1]} has no field {path}; {instead}leave it out."
            )
        if value is not None:
            _check_value(path, value, field, minor)


def _instead(name: str, table: Table, minor: tuple[int, int]) -> str:
    """A field of this release that is called much like it."""
    alive = [one for one, field in table.items() if minor >= field.since and (not field.until or minor < field.until)]
    near = difflib.get_close_matches(name, alive, n=1, cutoff=0.75)
    return f"use {near[0]}, or " if near else ""


def _check_value(path: str, value: Any, field: Field, minor: tuple[int, int]) -> None:
    wanted: Any = _TYPES[field.kind]  # Any: a tuple of types would narrow `value` to object
    if not isinstance(value, wanted) or (isinstance(value, bool) and field.kind != "bool"):
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
        least = field.minimum if field.minimum is not None else "-∞"
        most = field.maximum if field.maximum is not None else "∞"
        raise FieldError(path, f"{path} is {value!r}; it must lie between {least} and {most}.")


def _check_rules(arguments: Mapping[str, Any], minor: tuple[int, int]) -> None:
    """What the validators of the library refuse, or quietly change."""
    windows = (arguments.get("kv_cache_config") or {}).get("max_attention_window")
    if windows is not None and (not windows or any(not isinstance(w, int) or w < 1 for w in windows)):
        raise InputError("kv_cache_config.max_attention_window must be a list of whole numbers of at least 1.")
    _check_speculation(arguments.get("speculative_config") or {}, minor)
    graphs = arguments.get("cuda_graph_config") or {}
    sizes = graphs.get("batch_sizes")
    if sizes and graphs.get("max_batch_size") and max(sizes) != graphs["max_batch_size"]:
        raise InputError("cuda_graph_config.max_batch_size must be the largest of batch_sizes; give one of the two.")
    if arguments.get("lora_config") and not arguments.get("enable_lora", True):
        raise InputError("lora_config needs enable_lora true.")


def _check_speculation(given: Mapping[str, Any], minor: tuple[int, int]) -> None:
    kind = given.get("decoding_type")
    if given and kind is None:
        types = SPECULATIVE["decoding_type"].choices_of(minor)
        raise InputError(f"speculative_config needs its decoding_type: {', '.join(types)}.")
    if kind in ("Eagle3", "Draft_Target") and not (given.get("max_draft_len") and given.get("speculative_model")):
        raise InputError(f"speculative_config {kind} needs max_draft_len and speculative_model, a draft model.")
    if kind in ("NGram", "SA") and not given.get("max_draft_len"):
        raise InputError(f"speculative_config {kind} needs max_draft_len.")
