"""The target tensorrt, served by NVIDIA's C++ backend or by our engine model.

Our engine model uses TensorRT-LLM's executor. `llmops repo --serving` chooses the server.

Both servers take the parameters of NVIDIA/TensorRT-LLM
`triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt`. `build --set
serve.KEY=VALUE` stores them in engine.json.
"""

from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.engine_folder.manifest_extras import TensorrtExtra
from llmops.build.trtllm.backend_files import TOKENIZER_INFO
from llmops.build.trtllm.backend_parameters import NVIDIA_ONLY, PARAMETERS, checked_parameters
from llmops.build.trtllm.image_selection import release_of
from llmops.build.trtllm.trtllm_build_flags import from_argv
from llmops.contract import (
    GUIDE_KINDS,
    PYTHON_ENGINE_INPUTS,
    PYTHON_ENGINE_OUTPUTS,
    REQUEST_TRANSPORT,
    RUNTIME_PARAMETER,
    STEP_TRANSPORT,
)
from llmops.errors import InputError
from llmops.input_files import read_json
from llmops.model_repository.repository.compatibility import check_library
from llmops.model_repository.targets.repository_target import EngineModelConfig, RepositoryTarget, divides_vocabulary

#: Size in bytes of the LoRA cache in host memory: the default of NVIDIA's backend.
_LORA_CACHE = 1 << 30
#: The parameter that decides which requests are admitted and paused when the KV cache fills up.
_POLICY = "batch_scheduler_policy"
#: Parameters that need an engine with paged context FMHA. Without paged context FMHA, an engine
#: with chunked context does not load.
_PAGED_CONTEXT = ("enable_kv_cache_reuse", "enable_chunked_context")


class TensorrtRepositoryTarget(RepositoryTarget):
    """The target of TensorRT engines."""

    name = "tensorrt"

    def __init__(self, ours: bool = False) -> None:
        """Create the target for our engine model (`ours`), or for NVIDIA's C++ backend."""
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
            # unused, but NVIDIA's backend does not load a model without this parameter
            "tokenizer_dir": str((directory / manifest.tokenizer.directory).resolve()),
        }
        return EngineModelConfig("tensorrtllm", parameters, python_model=False)

    def max_length(self, manifest: EngineManifest) -> int:
        # The executor shortens answers so that a draft still fits behind them (batch_manager/
        # llmRequest.cpp, validate, "Number of requested output tokens is changed to").
        draft = from_argv(_built(manifest).trtllm_build[1:]).get("max_draft_len") or 0
        return manifest.limits.max_seq_len - int(str(draft))

    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        # the lookahead layer always takes the most likely token (types.h, DecodingMode::Lookahead,
        # and lookaheadDecodingLayer.cpp, forwardAsync)
        full = not _built(manifest).speculative
        # the layer of external draft tokens computes no log-probabilities and ignores min_p
        # (externalDraftTokensLayer.cpp, and types.h, DecodingMode::ExternalDraftTokens)
        alone = full and "draft_tokens_external" not in _built(manifest).trtllm_build
        found = {
            "logprobs": alone,
            "top_logprobs": 0,
            "prompt_logprobs": False,
            "logit_bias": self._takes_bias(manifest),
            "n": 8 if self._ours else 1,
            "guided": list(GUIDE_KINDS) if _takes_guides(manifest) else [],
            "bad_words": full,
            "min_p": self._ours and alone,
            "seed": True,
            "penalties": full,
            "lora": bool(manifest.adapters),
        }
        # added by NVIDIA/TensorRT-LLM #7106, which 1.0 does not have and 1.1 may not have
        salts = self._ours and release_of(_built(manifest).tensorrt_llm) >= (1, 2)
        return {**found, "cache_salt": True} if salts else found

    def _takes_bias(self, manifest: EngineManifest) -> bool:
        """Return True if the engine takes a bias for each token of the vocabulary.

        NVIDIA's backend receives the bias as the gateway sends it. Our model pads the bias where
        the export has padded the vocabulary.
        """
        vocabulary = manifest.tokenizer.vocab_size
        built = _padded_vocabulary(vocabulary) if "awq" in manifest.quantisation.weights else vocabulary
        return divides_vocabulary(manifest, built) and (self._ours or built == vocabulary)

    def reports(self) -> dict[str, bool]:
        return {**super().reports(), "kv_events": self._ours, "cached_tokens": self._ours}

    def transports(self) -> list[str]:
        return [REQUEST_TRANSPORT, STEP_TRANSPORT] if self._ours else [REQUEST_TRANSPORT]


def _padded_vocabulary(size: int) -> int:
    """Return the size of a vocabulary in an AWQ export.

    ModelOpt pads the vocabulary to a multiple of 64 (`torch/export/postprocess.py`,
    pad_embedding_lm_head).
    """
    return -(-size // 64) * 64


def _built(manifest: EngineManifest) -> TensorrtExtra:
    return manifest.extra_as(TensorrtExtra)


def backend_settings(manifest: EngineManifest, directory: Path) -> dict[str, str]:
    """Return the C++ backend's parameters for the engine in `directory`.

    Raises:
        InputError: A parameter is unknown to the backend, has a value that the backend cannot
            parse, or needs a feature that the engine was built without.
    """
    given = checked_parameters(_built(manifest).serve)
    defaults = {name: parameter.default for name, parameter in PARAMETERS.items()}
    chosen = {**defaults, **checked_parameters(_planned(manifest)), **_decoding(manifest), **given}
    if _has_paged_context(directory / manifest.model_dir):
        return chosen
    for name in _PAGED_CONTEXT:
        if given.get(name) == "true":
            raise InputError(f"serve.{name}=true: the engine was built without paged context FMHA; leave it out.")
    return {**chosen, **dict.fromkeys(_PAGED_CONTEXT, "false")}


def _has_paged_context(model: Path) -> bool:
    """Return True if the engine has paged context.

    trtllm-build disables paged context for some KV-cache types with a warning.
    """
    try:
        config = read_json(model / "config.json")
        return config["build_config"]["plugin_config"]["use_paged_context_fmha"] is not False
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _planned(manifest: EngineManifest) -> dict[str, str]:
    """Return the parameters that `llmops plan` chose, for an engine that was built with a plan."""
    plan = manifest.plan or {}
    planned = {}
    if "kv_cache_fraction" in plan:
        planned["kv_cache_free_gpu_mem_fraction"] = str(plan["kv_cache_fraction"])
    if "chunked_prefill" in plan:
        planned["enable_chunked_context"] = str(plan["chunked_prefill"]).lower()
    return planned


def _decoding(manifest: EngineManifest) -> dict[str, str]:
    """Return the sizes of lookahead decoding that the engine was built for."""
    sizes = _built(manifest).speculative
    if not sizes:
        return {}
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    return {"decoding_mode": "lookahead", **dict(zip(names, map(str, sizes), strict=True))}


def _lora(directory: Path, manifest: EngineManifest, chosen: dict[str, str]) -> dict[str, str]:
    """Return the parameters that load all LoRA adapters with the model.

    The host cache is large enough for all adapters. A request then needs only a `lora_task_id`.

    Args:
        directory: The engine folder.
        manifest: The manifest of the engine folder.
        chosen: The engine's serving parameters, whose `lora_…` values override the defaults.
    """
    if not manifest.adapters:
        return {}
    room = str(max(2 * _built(manifest).lora_bytes, _LORA_CACHE))
    return {
        "lora_cache_host_memory_bytes": room,
        "lora_prefetch_dir": str((directory / "lora_prefetch").resolve()),
        **{name: value for name, value in chosen.items() if name.startswith("lora_")},
    }


def _takes_guides(manifest: EngineManifest) -> bool:
    """Return True if answers can follow a grammar.

    A step of lookahead decoding has several tokens, of which the grammar would see only one. A
    request that the policy max_utilization pauses begins its grammar again (guidedDecoder.cpp,
    build and execute).
    """
    built = _built(manifest)
    return built.guided and not built.speculative and built.serve.get(_POLICY) != "max_utilization"


def _guided(directory: Path, manifest: EngineManifest) -> dict[str, str]:
    """Return the parameters for grammars, which need the tokenizer's vocabulary in a file.

    Without grammars both parameters are present but empty. The backend supports only xgrammar.
    """
    guided = _takes_guides(manifest)
    return {
        "guided_decoding_backend": "xgrammar" if guided else "",
        "xgrammar_tokenizer_info_path": str((directory / TOKENIZER_INFO).resolve()) if guided else "",
    }


target = TensorrtRepositoryTarget()
