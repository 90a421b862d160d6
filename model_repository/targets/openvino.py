"""The target openvino: our engine model on OpenVINO GenAI's continuous batching."""

import json
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.engine_folder.manifest_extras import OpenVinoExtra
from llmops.build.environment import installed_version
from llmops.contract import GUIDE_KINDS, PYTHON_ENGINE_INPUTS, PYTHON_ENGINE_OUTPUTS, RUNTIME_PARAMETER
from llmops.distribution import missing_extra
from llmops.errors import InputError, VersionMismatchError
from llmops.model_repository.targets.repository_target import EngineModelConfig, RepositoryTarget

MODEL_FILE = "openvino_model.xml"


class OpenVINORepositoryTarget(RepositoryTarget):
    """The target of OpenVINO engines."""

    name = "openvino"

    def check(self, directory: Path, manifest: EngineManifest) -> None:
        path = directory / manifest.model_dir / MODEL_FILE
        if not path.is_file() or not path.with_suffix(".bin").is_file():
            raise InputError(f"{directory} is damaged: {path.name} or its .bin is missing. Build the engine again.")
        built = manifest.versions.get("openvino")
        if built and _release(built) > _release(_installed("openvino")):
            raise VersionMismatchError(
                f"{directory} was built with OpenVINO {built}, but {_installed('openvino')} is installed: "
                "upgrade openvino-genai or build the engine again."
            )

    def for_tenants_apart(self, manifest: EngineManifest) -> EngineManifest:
        """Return a manifest without a prefix cache, unless the manifest sets one explicitly.

        GenAI's prefix cache cannot separate tenants. Switching it off at their first request would
        block the engine for seconds.
        """
        extra = manifest.extra
        # encoders have no prefix cache
        if not isinstance(extra, OpenVinoExtra) or extra.openvino.prefix_cache is not None:
            return manifest
        openvino = extra.openvino.model_copy(update={"prefix_cache": False})
        return manifest.model_copy(update={"extra": extra.model_copy(update={"openvino": openvino})})

    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModelConfig:
        return EngineModelConfig(
            backend="python",
            parameters={
                RUNTIME_PARAMETER: "openvino",
                "gpt_model_type": "inflight_fused_batching",
                "gpt_model_path": str((directory / manifest.model_dir).resolve()),
                "max_beam_width": "1",
                "batch_scheduler_policy": "max_utilization",
                "enable_kv_cache_reuse": "true",
                "enable_chunked_context": "true",
                "max_num_tokens": str(manifest.limits.max_num_tokens),
                "openvino": json.dumps(manifest.extra_as(OpenVinoExtra).openvino.model_dump(exclude_unset=True)),
            },
            inputs=list(PYTHON_ENGINE_INPUTS),
            outputs=list(PYTHON_ENGINE_OUTPUTS),
        )

    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        return {
            "logprobs": True,
            "top_logprobs": 0,
            "prompt_logprobs": False,
            "logit_bias": False,
            "n": 8,
            "guided": list(GUIDE_KINDS),
            "bad_words": False,
            "min_p": True,
            "callers": True,
            "seed": True,
            "penalties": True,
            "lora": False,
            "cache_salt": False,
        }

    def batch_invariant(self, manifest: EngineManifest) -> bool:
        """Return True for float32 arithmetic, a float32 cache and unquantized activations.

        docs/decisions/0007 has the reason.
        """
        has = manifest.extra_as(OpenVinoExtra).openvino.properties.get
        plain = manifest.quantisation.weights == "none" or has("DYNAMIC_QUANTIZATION_GROUP_SIZE") == "0"
        return plain and has("INFERENCE_PRECISION_HINT") == has("KV_CACHE_PRECISION") == "f32"

    def reports(self) -> dict[str, bool]:
        """Return the reports of the step stream, including KV-cache events.

        The events are estimated from recent prompts, because GenAI reports none.
        """
        return {**super().reports(), "kv_events": True}


def _installed(package: str) -> str:
    found = installed_version(package)
    if not found:
        raise missing_extra(f"OpenVINO engines need {package}, which is not installed", "embedded")
    return found


def _release(text: str) -> tuple[int, ...]:
    """Return the year and release of a version.

    Versions that differ only in patch and build have the same model format.
    """
    parts = text.replace("-", ".").split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


target = OpenVINORepositoryTarget()
