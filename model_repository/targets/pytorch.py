"""Checkpoints for TensorRT-LLM's PyTorch backend: our Python-backend model over `tensorrt_llm.LLM`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmops.build.manifest import EngineManifest
from llmops.build.trtllm.llm_args import check_llm_args
from llmops.errors import InputError
from llmops.model_repository.match import check_library
from llmops.model_repository.targets.base import GUIDES, EngineModel, RepositoryTarget
from llmops.model_repository.tensors import OUR_INPUTS, OUR_OUTPUTS


class PytorchTarget(RepositoryTarget):
    name = "pytorch"

    def check(self, directory: Path, manifest: EngineManifest) -> None:
        if not (directory / manifest.model_dir / "config.json").is_file():
            raise InputError(f"{directory} is damaged: {manifest.model_dir}/config.json is missing. Build it again.")
        version = str(manifest.extra["tensorrt_llm"])
        check_llm_args(manifest.extra["llm_args"], version)
        check_library("pytorch", version)

    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModel:
        return EngineModel(
            backend="python",
            parameters={
                "llmops_runtime": "pytorch",
                "gpt_model_type": "inflight_fused_batching",
                "gpt_model_path": str((directory / manifest.model_dir).resolve()),
                "max_beam_width": "1",
                "llm_args": json.dumps(manifest.extra["llm_args"]),
                **adapter_folders(directory, manifest),
            },
            inputs=OUR_INPUTS,
            outputs=OUR_OUTPUTS,
        )

    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        guided = manifest.extra["llm_args"].get("guided_decoding_backend") is not None
        return llm_api_capabilities(guided, lora=bool(manifest.extra.get("adapters")))


def adapter_folders(directory: Path, manifest: EngineManifest) -> dict[str, str]:
    """The parameter that tells our model what `LoRARequest` wants: id, name and folder of each adapter."""
    adapters = manifest.extra.get("adapters")
    if not adapters:
        return {}
    root = directory.resolve() / "lora"
    return {"lora_adapters": json.dumps([{**one, "path": str(root / one["name"])} for one in adapters])}


def llm_api_capabilities(guided: bool, lora: bool) -> dict[str, Any]:
    """What our model over the LLM API takes."""
    return {
        "logprobs": True,
        "top_logprobs": 0,
        "logit_bias": False,
        "n": 8,
        "guided": list(GUIDES) if guided else [],
        "bad_words": False,
        "min_p": True,
        "seed": True,
        "lora": lora,
    }
