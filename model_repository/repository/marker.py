"""`.llmops-repository.json`: what a model repository was made of, and what it takes to run it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmops.errors import InputError

FILE_NAME = ".llmops-repository.json"


@dataclass(frozen=True)
class ServedEngine:
    """One served name. `backend` and `runtime` are Triton's and ours (empty for NVIDIA's C++ backend); `tensorrt_llm`
    is empty where the engine does not run on it. GPUs = tp_size * pp_size."""

    directory: str
    key: str
    target: str
    backend: str
    runtime: str = ""
    tp_size: int = 1
    pp_size: int = 1
    tensorrt_llm: str = ""
    gpu_device_ids: str = ""

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_mpi(self) -> bool:
        """NVIDIA's C++ backend wants one MPI rank per GPU; everything else starts its own workers."""
        return self.backend == "tensorrtllm"


@dataclass(frozen=True)
class Marker:
    """Served names with their engines; empty for a repository that llmops did not make."""

    llmops: str = ""
    contract: int = 1
    engines: dict[str, ServedEngine] = field(default_factory=dict)

    @property
    def on_gpus(self) -> bool:
        """True if any engine runs on TensorRT-LLM."""
        return any(engine.tensorrt_llm for engine in self.engines.values())

    def save(self, repository: Path) -> None:
        (repository / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, repository: Path) -> Marker:
        """Raises InputError for a file that was edited or made by another version."""
        path = repository / FILE_NAME
        if not path.is_file():
            return cls()
        try:
            content = json.loads(path.read_bytes())
            engines = {name: ServedEngine(**fields) for name, fields in content["engines"].items()}
            return cls(content["llmops"], content["contract"], engines)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} was written by another version of llmops or edited ({error}): make the repository again with "
                "`llmops repo`."
            ) from error
