"""What a target adds to the engine model's configuration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.contract import ENGINE_INPUTS, ENGINE_OUTPUTS, REQUEST_TRANSPORT, STEP_TRANSPORT, Tensor


@dataclass(frozen=True)
class EngineModelConfig:
    """How Triton runs one engine: the backend, its tensors, its `parameters`, and the files of its version folder."""

    backend: str
    parameters: dict[str, str]
    inputs: list[Tensor] = field(default_factory=lambda: list(ENGINE_INPUTS))
    outputs: list[Tensor] = field(default_factory=lambda: list(ENGINE_OUTPUTS))
    python_model: bool = True


class RepositoryTarget(ABC):
    """One implementation per build target. Stateless."""

    name: str

    @abstractmethod
    def check(self, directory: Path, manifest: EngineManifest) -> None:
        """Raise VersionMismatchError or InputError, with the fix, when this engine cannot be served here."""

    @abstractmethod
    def engine_model(self, directory: Path, manifest: EngineManifest) -> EngineModelConfig:
        """Backend, tensors and parameters of NAME-tensorrt_llm."""

    @abstractmethod
    def capabilities(self, manifest: EngineManifest) -> dict[str, Any]:
        """The `capabilities` of the card, see docs/contract.md."""

    def transports(self) -> list[str]:
        return [REQUEST_TRANSPORT, STEP_TRANSPORT]

    def batch_invariant(self, manifest: EngineManifest) -> bool:
        """Whether another replica continues an answer, given prompt and tokens, exactly as this one would."""
        return False

    def reports(self) -> dict[str, bool]:
        """`state`, `kv_events` and `cached_tokens` of the card: what its step stream tells of the engine."""
        ours = STEP_TRANSPORT in self.transports()
        return {"state": ours, "kv_events": False, "cached_tokens": False}
