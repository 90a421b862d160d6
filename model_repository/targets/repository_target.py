"""The interface of a build target in a model repository."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.contract import ENGINE_INPUTS, ENGINE_OUTPUTS, REQUEST_TRANSPORT, STEP_TRANSPORT, Tensor


@dataclass(frozen=True)
class EngineModelConfig:
    """The configuration of one engine model.

    `python_model` is True if our own code runs the engine.
    """

    backend: str
    parameters: dict[str, str]
    inputs: list[Tensor] = field(default_factory=lambda: list(ENGINE_INPUTS))
    outputs: list[Tensor] = field(default_factory=lambda: list(ENGINE_OUTPUTS))
    python_model: bool = True


class RepositoryTarget(ABC):
    """The interface of a build target for model repositories. Implementations have no state."""

    name: str

    @abstractmethod
    def check(self, directory: Path, manifest: EngineManifest) -> None:
        """Raise VersionMismatchError or InputError if the engine cannot be served here.

        The error's message has the fix.
        """

    def for_tenants_apart(self, manifest: EngineManifest) -> EngineManifest:
        """Return the manifest to serve behind a gateway that separates tenants' cached prefixes."""
        return manifest

    @abstractmethod
    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModelConfig:
        """Return the backend, tensors and parameters of NAME-tensorrt_llm."""

    @abstractmethod
    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        """Return the `capabilities` of the model metadata, which docs/contract.md describes."""

    def max_sequences(self, manifest: EngineManifest) -> int:
        """Return the maximum number of running sequences, the metadata's `max_batch_size`."""
        return manifest.limits.max_batch_size

    def max_length(self, manifest: EngineManifest) -> int:
        """Return the maximum number of tokens of prompt and answer, the metadata's `max_seq_len`."""
        return manifest.limits.max_seq_len

    def transports(self) -> list[str]:
        """Return the `transports` of the model metadata, by which gateways may send requests."""
        return [REQUEST_TRANSPORT, STEP_TRANSPORT]

    def batch_invariant(self, manifest: EngineManifest) -> bool:
        """Return True if another replica continues an answer exactly as this one would.

        The other replica continues from the prompt and the generated tokens.
        """
        return False

    def reports(self) -> dict[str, bool]:
        """Return the parts of the model metadata that describe the step stream.

        These parts list the reports about the engine that the step stream has.
        """
        ours = STEP_TRANSPORT in self.transports()
        return {"state": ours, "kv_events": False, "cached_tokens": False}


def divides_vocabulary(manifest: EngineManifest, size: int) -> bool:
    """Return True if TensorRT-LLM's C++ decoder takes a bias for a vocabulary of `size` tokens.

    The decoder requires `size` numbers (1.2.1
    cpp/tensorrt_llm/batch_manager/createNewDecoderRequests.cpp, initializeEmbeddingBias) and copies
    them to a buffer whose length is `size`, rounded up to a multiple of the number of ranks
    (runtime/decoderState.cpp, reshapeBuffers). If the two lengths differ, the copy fails, and the
    error ends all running requests.
    """
    return size % manifest.parallelism.world_size == 0
