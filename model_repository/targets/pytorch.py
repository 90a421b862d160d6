"""Checkpoints for TensorRT-LLM's PyTorch backend: our Python-backend model over `tensorrt_llm.LLM`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.extras import PytorchExtra
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.installed import installed_version
from llmops.build.trtllm.llm_releases import Profile, profile_of, profiles
from llmops.contract import GUIDES, OUR_INPUTS, OUR_OUTPUTS, RUNTIME
from llmops.errors import InputError
from llmops.model_repository.repository.match import check_library
from llmops.model_repository.targets.base import EngineModel, RepositoryTarget


class PytorchTarget(RepositoryTarget):
    name = "pytorch"

    def check(self, directory: Path, manifest: EngineManifest) -> None:
        if not (directory / manifest.model_dir / "config.json").is_file():
            raise InputError(f"{directory} is damaged: {manifest.model_dir}/config.json is missing. Build it again.")
        check_library("pytorch", manifest.tensorrt_llm)
        served_profile(manifest)

    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModel:
        return EngineModel(
            backend="python",
            parameters={
                RUNTIME: "pytorch",
                "gpt_model_type": "inflight_fused_batching",
                "gpt_model_path": str((directory / manifest.model_dir).resolve()),
                "max_beam_width": "1",
                "llm_profiles": json.dumps([one.as_json() for one in _profiles(manifest)]),
                **_adapter_folders(directory, manifest),
            },
            inputs=OUR_INPUTS,
            outputs=OUR_OUTPUTS,
        )

    def reports(self) -> dict[str, bool]:
        return {**super().reports(), "kv_events": True, "cached_tokens": True}

    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        sampling = served_profile(manifest).sampling
        guided = manifest.extra_as(PytorchExtra).llm_args.get("guided_decoding_backend") is not None
        return {
            "logprobs": True,
            # OpenAI's own limit
            "top_logprobs": 20 if sampling.top_logprobs else 0,
            "logit_bias": sampling.logit_bias,
            "n": 8,
            "guided": list(GUIDES) if guided else [],
            "bad_words": False,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "penalties": sampling.penalties,
            "lora": bool(manifest.adapters),
            "cache_salt": True,
        }


def _profiles(manifest: EngineManifest) -> list[Profile]:
    return profiles(manifest.extra_as(PytorchExtra).llm_args, manifest.quantisation.weights)


def served_profile(manifest: EngineManifest) -> Profile:
    """The profile for the installed TensorRT-LLM, or else for the one that the engine was made for. Raises InputError
    where that cannot run the engine."""
    version = installed_version("tensorrt_llm") or manifest.tensorrt_llm
    return profile_of(manifest.extra_as(PytorchExtra).llm_args, version, manifest.quantisation.weights)


def _adapter_folders(directory: Path, manifest: EngineManifest) -> dict[str, str]:
    """The parameter that tells our model what `LoRARequest` wants: id, name and folder of each adapter."""
    if not manifest.adapters:
        return {}
    root = directory.resolve() / "lora"
    return {
        "lora_adapters": json.dumps([{**one.model_dump(), "path": str(root / one.name)} for one in manifest.adapters])
    }


target = PytorchTarget()
