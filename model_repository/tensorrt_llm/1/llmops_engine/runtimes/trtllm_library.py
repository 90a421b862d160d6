"""Which TensorRT-LLM is here, and the arguments that it takes: the newest profile that is not newer than it.

Profiles come from `llmops repo` (build/trtllm/release_profiles.py); the library's own argument class has the last word.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

# 1.3 reports usage over HTTP unless disabled; set it to 0 to allow that
_QUIET = ("TRTLLM_NO_USAGE_STATS", "1")
# makes the library record KV-cache events, and how many of them it keeps until they are read
EVENTS, EVENTS_KEPT = "event_buffer_max_size", 65_536
# capabilities that differ between releases and samplers
_SAMPLING = ("min_p", "seed", "penalties", "logit_bias", "top_logprobs")


@dataclass(frozen=True)
class Library:
    """The names of `tensorrt_llm` that are used; `arguments` is its argument class.

    `read_extra` turns plain dicts into the objects that 1.2 wants.
    """

    version: str
    LLM: Any
    SamplingParams: Any
    GuidedDecodingParams: Any
    LoRARequest: Any
    arguments: Any
    read_extra: Any = None


def load_library() -> Library:
    """Import it."""
    os.environ.setdefault(*_QUIET)
    import tensorrt_llm as library  # type: ignore[import-not-found]
    from tensorrt_llm.executor import LoRARequest  # type: ignore[import-not-found]
    from tensorrt_llm.llmapi import GuidedDecodingParams  # type: ignore[import-not-found]

    names = (library.SamplingParams, GuidedDecodingParams, LoRARequest)
    from tensorrt_llm.llmapi import llm_args  # type: ignore[import-not-found]

    read_extra = getattr(llm_args, "update_llm_args_with_extra_dict", None)
    return Library(library.__version__, library.LLM, *names, llm_args.TorchLlmArgs, read_extra)


def choose_profile(profiles: list[dict[str, Any]], version: str) -> dict[str, Any]:
    """Raises ValueError where this version cannot run the engine."""
    minor = release(version)
    fitting = [one for one in profiles if tuple(one["since"]) <= minor]
    if not fitting:
        first = ".".join(map(str, profiles[0]["since"]))
        raise ValueError(f"TensorRT-LLM {version} is older than {first}, which this engine needs at least")
    profile = fitting[-1]
    if profile["refused"]:
        raise ValueError(f"TensorRT-LLM {version} cannot run this engine: {profile['refused']}")
    return profile


def release(version: str) -> tuple[int, int]:
    """(major, minor)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_announced(capabilities: dict[str, Any], profile: dict[str, Any], version: str) -> None:
    """Raise ValueError where the repository announces what this version would ignore."""
    wrong = [name for name in _SAMPLING if capabilities.get(name) and not profile["sampling"][name]]
    if wrong:
        raise ValueError(
            f"the repository announces {', '.join(wrong)}, which TensorRT-LLM {version} would ignore: make it again "
            "with `llmops repo` where this version is installed"
        )


def final_arguments(library: Library, profile: dict[str, Any], model: str, tokenizer: str) -> dict[str, Any]:
    """What `LLM(...)` is called with. Raises ValueError, naming the field, for what the library refuses."""
    arguments = {**profile["arguments"], "model": model, "tokenizer": tokenizer}
    known = getattr(library.arguments, "model_fields", {})
    arguments |= {name: value for name, value in profile["wishes"].items() if name in known}
    cache = arguments.get("kv_cache_config")
    if isinstance(cache, dict) and cache.get("enable_block_reuse"):
        arguments["kv_cache_config"] = {EVENTS: EVENTS_KEPT, **cache}
    try:
        if library.read_extra is not None and release(library.version) < (1, 3):
            arguments = library.read_extra({}, arguments)
        library.arguments(**arguments)
    except ValueError as error:
        raise ValueError(_refusal(error, library.version)) from error
    return arguments


def _refusal(error: ValueError, version: str) -> str:
    """One sentence of a pydantic ValidationError, whose text has a line per field."""
    details: list[dict[str, Any]] = getattr(error, "errors", list)()
    if details:
        where = ".".join(map(str, details[0]["loc"])) or "its arguments"
        why = str(details[0]["msg"]).removeprefix("Value error, ")
    else:
        where, why = "its arguments", str(error)
    return (
        f"TensorRT-LLM {version} refuses {where} of this engine ({why}); `llmops upgrade ENGINE --to "
        f"{'.'.join(map(str, release(version)))}` says what to change"
    )
