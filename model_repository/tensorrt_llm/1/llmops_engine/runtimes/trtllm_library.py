"""Access to the installed TensorRT-LLM, and the conversions that both of its runtimes share.

Profiles of LLM-API arguments come from `llmops repo` (build/trtllm/release_profiles.py), one per
release line: the newest profile that is not newer than the library applies. The library's argument
class then validates the arguments.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llmops_contract as contract
import numpy as np

from ..request import RequestRejectedError, RuntimeRequest

if TYPE_CHECKING:
    from ..kv_events import KvEventTranslator

#: The KV-cache argument that makes the library record events.
EVENTS = "event_buffer_max_size"
#: Maximum number of KV-cache events that the library keeps until the next read; it then drops the
#: oldest. Large, because gateways forget the whole cache after a lost event.
EVENTS_KEPT = 65_536
#: Timeout of reads from the library: return what has arrived, without waiting.
NO_WAIT = 0
# TensorRT-LLM 1.3 reports usage over HTTP unless this variable is set. A user can set it to 0 to
# allow the reports.
_NO_USAGE_STATS = ("TRTLLM_NO_USAGE_STATS", "1")
# variable that trtllm-llmapi-launch sets after it has started the workers of this process
_LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"
# prefixes of the environment variables that identify an MPI job. The variables of MPI settings
# (PMIX_MCA_*, OMPI_MCA_*) are not among them.
_MPI_JOB = (
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_FIRST_", "OMPI_APP_", "OMPI_MCA_orte_"),
    *("ORTE_", "PRTE_LAUNCHED", "PMIX_", "PMI_"),
)
# Variables that let root start the daemon through which Open MPI 5 spawns workers; NVIDIA's images
# have Open MPI 5 from 1.3.0rc27 on. Without the variables the spawn fails with MPI_ERR_UNKNOWN
# (ompi/dpm/dpm.c, start_dvm). mpirun removes the variables from the environment of its processes.
_ALLOW_ROOT = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# CUDA errors after which every later request of this process fails as well (CUDA Runtime API,
# cudaError: "the process must be terminated and relaunched").
_FATAL_CUDA_ERRORS = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "misaligned address",
    "an illegal instruction was encountered",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
)
# capabilities that depend on the release and on the sampler
_SAMPLING = ("min_p", "seed", "penalties", "logit_bias", "top_logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class Library:
    """The parts of `tensorrt_llm` that the LLM-API runtime uses.

    `arguments` is the class of the arguments of `LLM(...)`. `read_extra` converts plain dicts to
    the objects that release 1.2 requires.
    """

    version: str
    LLM: Any
    SamplingParams: Any
    GuidedDecodingParams: Any
    LoRARequest: Any
    arguments: Any
    read_extra: Any = None


def load_library() -> Library:
    """Import TensorRT-LLM and return its parts."""
    os.environ.setdefault(*_NO_USAGE_STATS)
    import tensorrt_llm as library  # type: ignore[import-not-found]
    from tensorrt_llm.executor import LoRARequest  # type: ignore[import-not-found]
    from tensorrt_llm.llmapi import GuidedDecodingParams, llm_args  # type: ignore[import-not-found]

    return Library(
        version=library.__version__,
        LLM=library.LLM,
        SamplingParams=library.SamplingParams,
        GuidedDecodingParams=GuidedDecodingParams,
        LoRARequest=LoRARequest,
        arguments=llm_args.TorchLlmArgs,
        read_extra=getattr(llm_args, "update_llm_args_with_extra_dict", None),
    )


def choose_profile(profiles: list[dict[str, Any]], version: str) -> dict[str, Any]:
    """Return the profile for a version of the library.

    Raises ValueError if the version cannot run the engine.
    """
    fitting = [profile for profile in profiles if tuple(profile["since"]) <= release(version)]
    if not fitting:
        first = ".".join(map(str, profiles[0]["since"]))
        raise ValueError(
            f"TensorRT-LLM {version} is older than {first}, the oldest version that can run "
            "this engine; install a newer one"
        )
    profile = fitting[-1]
    if profile["refused"]:
        raise ValueError(f"TensorRT-LLM {version} cannot run this engine: {profile['refused']}")
    return profile


class GpuBlocks:
    """A counter of the KV-cache blocks on the GPU, for statistics that count those in host memory too.

    1.2 counts every block in host memory as used (NVIDIA/TensorRT-LLM #15075; kvCacheManager.h,
    getNumAllocatedBlocks). A block that is kept for reuse is free, so the largest number of free
    blocks so far is the GPU's.
    """

    def __init__(self, *, has_host_blocks: bool) -> None:
        self._has_host_blocks = has_host_blocks
        self._most_free = 0

    def count(self, blocks: int, used: int) -> tuple[int, int]:
        """Return the number of blocks, and of used blocks, on the GPU. 0 means unknown."""
        if not self._has_host_blocks or not blocks:
            return blocks, used
        free = blocks - used
        self._most_free = max(self._most_free, free)
        return self._most_free, self._most_free - free


def release(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version of TensorRT-LLM."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_announced(capabilities: dict[str, Any], profile: dict[str, Any], version: str) -> None:
    """Raise ValueError if the repository announces capabilities that this version ignores."""
    ignored = [name for name in _SAMPLING if capabilities.get(name) and not profile["sampling"][name]]
    if ignored:
        raise ValueError(
            f"the repository announces {', '.join(ignored)}, which TensorRT-LLM {version} ignores: make the "
            "repository again with `llmops repo` where this version is installed"
        )


def final_arguments(library: Library, profile: dict[str, Any], model: str, tokenizer: str) -> dict[str, Any]:
    """Return the arguments of `LLM(...)`.

    Raises ValueError, which names the field, if the library rejects an argument.
    """
    arguments = {**profile["arguments"], "model": model, "tokenizer": tokenizer}
    known = getattr(library.arguments, "model_fields", {})
    arguments |= {name: value for name, value in profile["wishes"].items() if name in known}
    cache = arguments.get("kv_cache_config")
    if isinstance(cache, dict) and cache.get("enable_block_reuse") and not arguments.get("enable_attention_dp"):
        arguments["kv_cache_config"] = {EVENTS: EVENTS_KEPT, **cache}
    try:
        if library.read_extra is not None and release(library.version) < (1, 3):
            arguments = library.read_extra({}, arguments)
        library.arguments(**arguments)
    except ValueError as error:
        raise ValueError(_rejection(error, library.version)) from error
    return arguments


def _rejection(error: ValueError, version: str) -> str:
    """Return one sentence for a pydantic ValidationError, whose own text has many lines."""
    details: list[dict[str, Any]] = getattr(error, "errors", list)()
    field, reason = "its arguments", str(error)
    if details:
        field = ".".join(map(str, details[0]["loc"])) or field
        reason = str(details[0]["msg"]).removeprefix("Value error, ")
    return (
        f"TensorRT-LLM {version} refuses {field} of this engine ({reason}); `llmops upgrade ENGINE --to "
        f"{'.'.join(map(str, release(version)))}` says what to change"
    )


def restrict_visible_gpus(ids: str) -> None:
    """Let this process, and the workers that it starts, see only the GPUs with these numbers.

    The numbers are indexes, from 0, into the GPUs that the process sees already. Raises ValueError
    if the process sees too few GPUs.
    """
    if not ids:
        return
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(number) for number in ids.split(",")]
    if visible_devices is not None:
        visible = [device.strip() for device in visible_devices.split(",") if device.strip()]
        if max(numbers) >= len(visible):
            raise ValueError(
                f"the model runs on GPU {max(numbers)}, but CUDA_VISIBLE_DEVICES={visible_devices} shows "
                f"only {len(visible)} GPUs: add GPUs to it, or make the repository again with `llmops repo --gpus`"
            )
        ids = ",".join(visible[number] for number in numbers)
    os.environ["CUDA_VISIBLE_DEVICES"] = ids


def leave_mpi_job() -> None:
    """Remove the variables of an mpirun that started Triton for another model.

    With these variables, this process would be rank 0 of that model's job and could not spawn its
    own workers. After the removal, this process can spawn workers, even as root. NVIDIA's model for
    the LLM API removes these variables, too
    (triton_backend/all_models/llmapi/tensorrt_llm/1/model.py).
    """
    if os.environ.get(_LAUNCHED):
        return
    for name in list(os.environ):
        if name.startswith(_MPI_JOB) and not name.startswith("PMIX_MCA_"):
            del os.environ[name]
    os.environ.update(_ALLOW_ROOT)


def is_fatal_cuda_error(error: str) -> bool:
    """Return True if the error of a request says that its process can no longer use its GPU."""
    return any(fatal in error for fatal in _FATAL_CUDA_ERRORS)


def as_tensor(values: np.ndarray, size: int = 0) -> Any:
    """Return the values as a float32 torch tensor of length `size`, padded with zeros."""
    import torch

    padded = np.zeros(max(size, values.size), np.float32)
    padded[: values.size] = values
    return torch.from_numpy(padded)


def kv_event_translator(tokens_per_block: int) -> KvEventTranslator | None:
    """Return a translator of KV-cache events, or None if this Python cannot hash blocks.

    The hash needs a package that some installations lack. Without a translator, gateways receive no
    KV-cache events.
    """
    try:
        from ..kv_events import KvEventTranslator
    except ModuleNotFoundError:
        return None
    return KvEventTranslator(tokens_per_block)


def ordered_end_ids(request: RuntimeRequest, model_ends: tuple[int, ...]) -> list[int]:
    """Return the request's end tokens: the model's end tokens in the model's order, then others.

    `min_tokens` withholds only the first token of the list. The tokenizer's end of text comes first
    in the model metadata, and so in the list.
    """
    known = [token for token in model_ends if token in request.end_ids]
    return [*known, *sorted(request.end_ids.difference(known))]


def sampling_fields(request: RuntimeRequest, sequence: int) -> dict[str, Any]:
    """Return the sampling parameters that have the same names in the LLM API and the executor.

    A value of None keeps the library's default.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
    }
    if sampling.greedy:
        return {**fields, "top_k": 1}
    return {
        **fields,
        "temperature": sampling.temperature,
        # Always set top_p and top_k: the C++ sampler's defaults of 0 are greedy (1.2.1
        # layers/defaultDecodingParams.h; kernels/samplingTopKKernels.h, regularizeTopKTopP).
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "seed": None if sampling.seed is None else (sampling.seed + sequence) % 2**63,
    }


def check_guided_end(request: RuntimeRequest, model_ends: tuple[int, ...] = ()) -> None:
    """Raise RequestRejectedError for an answer that would go on after the end of its guide.

    Only the tokens of `model_ends` may follow a complete text. The executor has no mask for later
    tokens (batch_manager/guidedDecoder.cpp, build). PyTorch's decoder accepts no token while
    `min_tokens` withholds the end tokens (_torch/pyexecutor/guided_decoder.py, _build). Both cases
    would fail a step, and with it all requests.
    """
    if request.min_tokens:
        raise RequestRejectedError(f"{contract.MIN_TOKENS}: leave it out; the guide decides where the answer ends")
    ends = request.end_ids.union(word[0] for word in request.stop_words if len(word) == 1)
    if not ends.issuperset(model_ends):
        raise RequestRejectedError(f"{contract.END_ID}: leave it out; the guide decides where the answer ends")


@functools.lru_cache(maxsize=64)
def check_grammar(kind: str, guide: str, backend: str = "xgrammar") -> None:
    """Raise RequestRejectedError for a guide that the library's package `backend` cannot read.

    The library would read the guide within a step, where an error ends all requests, in the
    executor (batch_manager/guidedDecoder.cpp, build) and in PyTorch (_torch/pyexecutor). Newer
    releases of PyTorch's runtime end only one request, with an error that does not name the guide.
    """
    try:
        package = importlib.import_module(backend)
    except ImportError:
        return
    try:
        reason = _CHECKS[backend](package, kind, guide)
    except Exception as error:  # noqa: BLE001 - whatever the package raises, the guide is at fault
        reason = str(error)
    if reason:
        first_line = reason.partition("\n")[0]
        raise RequestRejectedError(f"{contract.GUIDE}: {first_line}")


def _read_with_xgrammar(package: Any, kind: str, guide: str) -> str:
    grammar = package.Grammar
    parse = {"json_schema": grammar.from_json_schema, "regex": grammar.from_regex, "ebnf_grammar": grammar.from_ebnf}
    if kind in parse:
        parse[kind](guide)
    return ""


def _read_with_llguidance(package: Any, kind: str, guide: str) -> str:
    """Return the error of a new LLMatcher, whose constructor never raises."""
    matcher = package.LLMatcher
    convert = {"json_schema": matcher.grammar_from_json_schema, "regex": matcher.grammar_from_regex}
    if kind not in convert:
        return ""
    is_error, messages = matcher.validate_grammar_with_warnings(convert[kind](guide))
    return str(messages[0]) if is_error else ""


_CHECKS = {"xgrammar": _read_with_xgrammar, "llguidance": _read_with_llguidance}
