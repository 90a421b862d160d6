"""The target pytorch: our engine model on TensorRT-LLM's LLM API, for checkpoints."""

import json
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.engine_folder.manifest_extras import PytorchExtra
from llmops.build.environment import installed_version
from llmops.build.trtllm.release_profiles import ReleaseProfile, profile_of_release, profiles_per_release
from llmops.contract import GUIDE_KINDS, PYTHON_ENGINE_INPUTS, PYTHON_ENGINE_OUTPUTS, RUNTIME_PARAMETER
from llmops.errors import InputError
from llmops.model_repository.repository.compatibility import check_library
from llmops.model_repository.targets.repository_target import EngineModelConfig, RepositoryTarget, divides_vocabulary

#: The kinds of guides that each grammar backend supports. llguidance has no EBNF grammars, because
#: it reads Lark's notation, while the gateway and its clients write xgrammar's (1.2.1
#: _torch/pyexecutor/grammar_matcher.py).
_GUIDE_KINDS: dict[str | None, list[str]] = {
    "xgrammar": list(GUIDE_KINDS),
    "llguidance": [kind for kind in GUIDE_KINDS if kind != "ebnf_grammar"],
}
#: Maximum size in bytes of the logits of one step, for an engine that returns the prompt's
#: log-probabilities. One such request makes the library compute the float32 logits of every prompt
#: token in its step (1.2.1 _torch/pyexecutor/py_executor.py, _forward_step, gather_context_logits),
#: for which no GPU memory is reserved. Without enough memory, the step fails for all its requests.
_STEP_LOGITS = 2 << 30
#: The library's default of `max_num_tokens` (1.2.1 and 1.3.0rc29 llmapi/llm_args.py).
_DEFAULT_STEP_TOKENS = 8192


class PytorchRepositoryTarget(RepositoryTarget):
    """The target of checkpoints for TensorRT-LLM's PyTorch backend."""

    name = "pytorch"

    def check(self, directory: Path, manifest: EngineManifest) -> None:
        if not (directory / manifest.model_dir / "config.json").is_file():
            raise InputError(f"{directory} is damaged: {manifest.model_dir}/config.json is missing. Build it again.")
        check_library("pytorch", manifest.tensorrt_llm)
        served_profile(manifest)

    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModelConfig:
        return EngineModelConfig(
            backend="python",
            parameters={
                RUNTIME_PARAMETER: "pytorch",
                "gpt_model_type": "inflight_fused_batching",
                "gpt_model_path": str((directory / manifest.model_dir).resolve()),
                "max_beam_width": "1",
                "llm_profiles": json.dumps([profile.as_json() for profile in _profiles(manifest)]),
                **_adapter_folders(directory, manifest),
            },
            inputs=PYTHON_ENGINE_INPUTS,
            outputs=PYTHON_ENGINE_OUTPUTS,
        )

    def max_sequences(self, manifest: EngineManifest) -> int:
        # with attention DP each rank has a separate batch (1.2.1
        # _torch/pyexecutor/executor_request_queue.py, _fetch_new_requests_attention_dp)
        batches = manifest.parallelism.tp_size if served_profile(manifest).arguments.get("enable_attention_dp") else 1
        return batches * manifest.limits.max_batch_size

    def reports(self) -> dict[str, bool]:
        return {**super().reports(), "kv_events": True, "cached_tokens": True}

    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        profile = served_profile(manifest)
        sampling = profile.sampling
        # in 1.2, TRTLLMSampler is the C++ decoder (_torch/pyexecutor/sampler.py,
        # setup_sampler_step)
        in_cpp = "TRTLLMSampler" in (profile.wishes | profile.arguments).values()
        arguments = manifest.extra_as(PytorchExtra).llm_args
        backend = arguments.get("guided_decoding_backend")
        # a request that this policy pauses begins its grammar again, as reported in
        # NVIDIA/TensorRT-LLM #18891
        if (arguments.get("scheduler_config") or {}).get("capacity_scheduler_policy") == "MAX_UTILIZATION":
            backend = None
        return {
            "logprobs": True,
            # the limit of OpenAI's API
            "top_logprobs": 20 if sampling.top_logprobs else 0,
            "prompt_logprobs": sampling.prompt_logprobs and _have_room(arguments, manifest.tokenizer.vocab_size),
            "logit_bias": sampling.logit_bias
            and (not in_cpp or divides_vocabulary(manifest, manifest.tokenizer.vocab_size)),
            "n": 8,
            "guided": _GUIDE_KINDS.get(backend, []),
            "bad_words": False,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "penalties": sampling.penalties,
            "lora": bool(manifest.adapters),
            "cache_salt": True,
        }


def _have_room(arguments: dict[str, Any], vocabulary: int) -> bool:
    """Return True if the logits of all tokens of a step take little memory."""
    tokens = int(arguments.get("max_num_tokens") or _DEFAULT_STEP_TOKENS)
    return 4 * tokens * vocabulary <= _STEP_LOGITS


def _profiles(manifest: EngineManifest) -> list[ReleaseProfile]:
    return profiles_per_release(manifest.extra_as(PytorchExtra).llm_args, manifest.quantisation.weights)


def served_profile(manifest: EngineManifest) -> ReleaseProfile:
    """Return the profile of LLM-API arguments for the installed TensorRT-LLM.

    If TensorRT-LLM is not installed, the profile is for the version that the engine was made for.

    Raises:
        InputError: The installed version of TensorRT-LLM cannot run the engine.
    """
    version = installed_version("tensorrt_llm") or manifest.tensorrt_llm
    return profile_of_release(manifest.extra_as(PytorchExtra).llm_args, version, manifest.quantisation.weights)


def _adapter_folders(directory: Path, manifest: EngineManifest) -> dict[str, str]:
    """Return the parameter that lists the adapters for the library's `LoRARequest`.

    Each adapter has an id, a name and a folder.
    """
    if not manifest.adapters:
        return {}
    root = directory.resolve() / "lora"
    return {
        "lora_adapters": json.dumps(
            [{**adapter.model_dump(), "path": str(root / adapter.name)} for adapter in manifest.adapters]
        )
    }


target = PytorchRepositoryTarget()
