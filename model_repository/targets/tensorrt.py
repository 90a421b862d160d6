"""TensorRT engines: NVIDIA's C++ backend, or if the user says so our Python-backend model over TensorRT-LLM's executor.

Parameters: NVIDIA/TensorRT-LLM `triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt`. They are
`build --set serve.KEY=VALUE`, kept in engine.json, and the same for both; `llmops repo --serving` chooses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.engine_folder.manifest_extras import TensorrtExtra
from llmops.build.trtllm.backend_files import TOKENIZER_INFO
from llmops.build.trtllm.backend_parameters import NVIDIA_ONLY, PARAMETERS, checked_parameters
from llmops.contract import (
    GUIDE_KINDS,
    PYTHON_ENGINE_INPUTS,
    PYTHON_ENGINE_OUTPUTS,
    REQUEST_TRANSPORT,
    RUNTIME_PARAMETER,
    STEP_TRANSPORT,
)
from llmops.errors import InputError
from llmops.model_repository.repository.compatibility import check_library
from llmops.model_repository.targets.repository_target import EngineModelConfig, RepositoryTarget

# the backend's own default
_LORA_CACHE = 1 << 30
# both need an engine with paged context FMHA; chunked context without it does not load
_PAGED_CONTEXT = ("enable_kv_cache_reuse", "enable_chunked_context")


class TensorrtRepositoryTarget(RepositoryTarget):
    name = "tensorrt"

    def __init__(self, ours: bool = False) -> None:
        """`ours`: our Python model serves the engine instead of NVIDIA's C++ backend."""
        self._ours = ours

    def check(self, directory: Path, manifest: EngineManifest) -> None:
        ranks = manifest.parallelism.world_size
        wanted = ["config.json", *(f"rank{rank}.engine" for rank in range(ranks))]
        missing = [name for name in wanted if not (directory / manifest.model_dir / name).is_file()]
        if missing:
            raise InputError(f"{directory} is damaged: {manifest.model_dir}/{missing[0]} is missing. Build it again.")
        if _built(manifest).guided and not (directory / TOKENIZER_INFO).is_file():
            raise InputError(f"{directory} is damaged: {TOKENIZER_INFO} is missing. Build it again.")
        backend_settings(manifest, directory)
        given = _built(manifest).serve
        foreign = next((name for name in NVIDIA_ONLY if given.get(name)), None)
        if self._ours and foreign is not None:
            raise InputError(
                f"serve.{foreign} of this engine is a setting of NVIDIA's C++ backend alone: leave --serving llmops "
                "out, or build without it."
            )
        if self._ours and ";" in str(given.get("gpu_device_ids", "")):
            raise InputError(
                "serve.gpu_device_ids of this engine has several instances, and --serving llmops runs one: serve it "
                "with --serving nvidia, or under several names."
            )
        check_library("tensorrt", manifest.tensorrt_llm)

    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModelConfig:
        chosen = {name: value for name, value in backend_settings(manifest, directory).items() if value}
        parameters = {
            "gpt_model_path": str((directory / manifest.model_dir).resolve()),
            **chosen,
            **_guided(directory, manifest),
            **_lora(directory, manifest, chosen),
        }
        if self._ours:
            own = {RUNTIME_PARAMETER: "tensorrt", "world_size": str(manifest.parallelism.world_size)}
            kept = {name: value for name, value in parameters.items() if name not in NVIDIA_ONLY}
            return EngineModelConfig("python", {**own, **kept}, list(PYTHON_ENGINE_INPUTS), list(PYTHON_ENGINE_OUTPUTS))
        parameters |= {
            "gpt_model_type": "inflight_fused_batching",
            "max_beam_width": "1",
            "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
            "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
            # read but not used, and a model without it does not load
            "tokenizer_dir": str((directory / manifest.tokenizer.directory).resolve()),
        }
        return EngineModelConfig("tensorrtllm", parameters, python_model=False)

    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        found = {
            "logprobs": True,
            "top_logprobs": 0,
            "logit_bias": True,
            "n": 8 if self._ours else 1,
            "guided": list(GUIDE_KINDS) if _built(manifest).guided else [],
            "bad_words": True,
            "min_p": self._ours,
            "seed": True,
            "penalties": True,
            "lora": bool(manifest.adapters),
        }
        return {**found, "cache_salt": True} if self._ours else found

    def reports(self) -> dict[str, bool]:
        return {**super().reports(), "kv_events": self._ours, "cached_tokens": self._ours}

    def transports(self) -> list[str]:
        return [REQUEST_TRANSPORT, STEP_TRANSPORT] if self._ours else [REQUEST_TRANSPORT]


def _built(manifest: EngineManifest) -> TensorrtExtra:
    return manifest.extra_as(TensorrtExtra)


def backend_settings(manifest: EngineManifest, directory: Path) -> dict[str, str]:
    """The C++ backend's parameters for the engine in `directory`. Raises InputError for one that the
    backend does not have, or would not parse, or that the engine was built without."""
    given = checked_parameters(_built(manifest).serve)
    defaults = {name: parameter.default for name, parameter in PARAMETERS.items()}
    chosen = {**defaults, **_planned(manifest), **_decoding(manifest), **given}
    if not 0 < float(chosen["kv_cache_free_gpu_mem_fraction"]) <= 1:
        raise InputError("serve.kv_cache_free_gpu_mem_fraction must be above 0 and at most 1.")
    if _has_paged_context(directory / manifest.model_dir):
        return chosen
    for name in _PAGED_CONTEXT:
        if given.get(name) == "true":
            raise InputError(f"serve.{name}=true: the engine was built without paged context FMHA; leave it out.")
    return {**chosen, **dict.fromkeys(_PAGED_CONTEXT, "false")}


def _has_paged_context(model: Path) -> bool:
    """trtllm-build switches it off for some KV-cache types, and says so in a warning only."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        return config["build_config"]["plugin_config"]["use_paged_context_fmha"] is not False
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _planned(manifest: EngineManifest) -> dict[str, str]:
    """What `llmops plan` decided about serving, where the engine was built with a plan."""
    plan = manifest.plan or {}
    planned = {}
    if "kv_cache_fraction" in plan:
        planned["kv_cache_free_gpu_mem_fraction"] = str(plan["kv_cache_fraction"])
    if "chunked_prefill" in plan:
        planned["enable_chunked_context"] = str(plan["chunked_prefill"]).lower()
    return planned


def _decoding(manifest: EngineManifest) -> dict[str, str]:
    """An engine built for lookahead decoding is run with the sizes that it was built for."""
    sizes = _built(manifest).speculative
    if not sizes:
        return {}
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    return {"decoding_mode": "lookahead", **dict(zip(names, map(str, sizes), strict=True))}


def _lora(directory: Path, manifest: EngineManifest, chosen: dict[str, str]) -> dict[str, str]:
    """The adapters are loaded when the model is, so that a request needs no more than its `lora_task_id`; the host
    cache holds them all."""
    if not manifest.adapters:
        return {}
    room = str(max(2 * _built(manifest).lora_bytes, _LORA_CACHE))
    return {
        "lora_cache_host_memory_bytes": room,
        "lora_prefetch_dir": str((directory / "lora_prefetch").resolve()),
        **{name: value for name, value in chosen.items() if name.startswith("lora_")},
    }


def _guided(directory: Path, manifest: EngineManifest) -> dict[str, str]:
    """Grammars need the tokenizer's vocabulary in a file; the backend knows xgrammar only. Without grammars both are
    empty, not absent."""
    guided = _built(manifest).guided
    return {
        "guided_decoding_backend": "xgrammar" if guided else "",
        "xgrammar_tokenizer_info_path": str((directory / TOKENIZER_INFO).resolve()) if guided else "",
    }


target = TensorrtRepositoryTarget()
