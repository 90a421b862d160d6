"""Interface of build targets.

`BuildTarget.prepare` checks a spec and returns the `TargetJob` that builds it. `get_target` imports
the module of a target when it is first used.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import ValidationError

from llmops.build.checkpoint import Checkpoint
from llmops.build.engine_folder.manifest import (
    EngineLimits,
    Golden,
    Parallelism,
    Quantisation,
    RecommendedSampling,
    Source,
    TokenizerInfo,
)
from llmops.build.engine_folder.manifest_extras import ManifestExtra
from llmops.build.progress import Progress
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import TargetName
from llmops.build.tokenizer import check_tokenizer, write_tokenizer
from llmops.errors import CheckpointError
from llmops.validation_errors import explain_error

_GIB = 2**30


@dataclass(frozen=True)
class BuildResult:
    """What a job reports for engine.json; its files lie in `workdir / model_dir`.

    `complete` is False when a step is left that needs other hardware (then `extra` says which command does it).
    """

    limits: EngineLimits
    extra: ManifestExtra
    quantisation: Quantisation = field(default_factory=Quantisation)
    parallelism: Parallelism = field(default_factory=Parallelism)
    model_dir: str = "model"
    complete: bool = True
    plan: dict[str, Any] | None = None
    quality: dict[str, Any] | None = None
    golden: Golden | None = None


@dataclass(frozen=True)
class StageRequirements:
    """Bytes. `gpu` is the sum over all GPUs; 0 means that the stage runs without. `here`: within this command.
    `minutes` is a rough estimate, None for a stage that does not end."""

    stage: str
    ram: int
    gpu: int
    disk: int
    minutes: float | None = None
    here: bool = False

    def line(self) -> str:
        """A row under HEADER."""
        gpu = f"{self.gpu / _GIB:8.1f} GiB" if self.gpu else "       none"
        time = "" if self.minutes is None else f"{max(math.ceil(self.minutes), 1):>6} min"
        return f"{self.stage:<28} {self.ram / _GIB:8.1f} GiB {gpu} {self.disk / _GIB:8.1f} GiB {time}".rstrip()


HEADER = f"{'stage':<28} {'memory':>12} {'all GPUs':>11} {'disk':>12} {'about':>10}"


class ModelDescription(Protocol):
    """What engine.json and --dry-run say of a checkpoint, whatever kind of model is in it."""

    @property
    def ref(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def hf_class(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def parameters(self) -> int: ...

    def source(self) -> Source: ...


C = TypeVar("C", bound=ModelDescription)
C_contra = TypeVar("C_contra", bound=ModelDescription, contravariant=True)


class TargetJob(ABC, Generic[C]):
    """One build that nothing speaks against but, perhaps, this machine. Heavy imports belong inside `build`."""

    def __init__(self, spec: BuildSpec, checkpoint: C) -> None:
        self.spec, self.checkpoint = spec, checkpoint

    @property
    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Libraries whose version changes the engine: distribution name -> version. Imports nothing heavy."""

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Upper estimate of what `build` writes, temporary files included."""

    @property
    def kept_bytes(self) -> int:
        """What of `disk_bytes` an earlier, unfinished build has written already. Hashes the checkpoint."""
        return 0

    @property
    def stage_requirements(self) -> Sequence[StageRequirements]:
        """What each stage will need, where that is worth planning for."""
        return ()

    @property
    def dry_run_lines(self) -> list[str]:
        """What --dry-run says of this job."""
        return []

    def check(self) -> None:
        """Raises MissingDependencyError, VersionMismatchError or ResourceError when it could not be built here."""
        return

    def inspect(self) -> None:
        """Raises CheckpointError for files beside the weights that are missing or damaged. Cheap."""
        return

    @property
    def sampling(self) -> RecommendedSampling:
        """What the model's makers recommend."""
        return RecommendedSampling()

    @abstractmethod
    def write_tokenizer(self, directory: Path, progress: Progress) -> TokenizerInfo:
        """Fill `directory`. Raises CheckpointError for a tokenizer that is damaged or another model's."""

    @abstractmethod
    def build(self, workdir: Path, progress: Progress) -> BuildResult:
        """Write `workdir / model_dir`. `workdir / "tokenizer"` is there already; the caller adds engine.json and moves
        workdir into place.

        Raises BuildError; may leave anything in workdir then, the caller removes it.
        """


def sampling_defaults(checkpoint: Checkpoint) -> RecommendedSampling:
    """The sampling fields of generation_config.json; as in vLLM its `do_sample` is not looked at.

    Raises CheckpointError for a value that no engine could take.
    """
    given = {name: checkpoint.generation_config.get(name) for name in RecommendedSampling.model_fields}
    if given["top_k"] == -1:
        given["top_k"] = 0
    try:
        return RecommendedSampling.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{checkpoint.ref}: generation_config.json: {first['loc'][0]} is {first['input']!r} ({explain_error(first)}); "
            "correct it or remove the line."
        ) from error


class GeneratorJob(TargetJob[Checkpoint]):
    """The job of a model that generates text."""

    def inspect(self) -> None:
        check_tokenizer(self.checkpoint)
        sampling_defaults(self.checkpoint)

    @property
    def sampling(self) -> RecommendedSampling:
        return sampling_defaults(self.checkpoint)

    def write_tokenizer(self, directory: Path, progress: Progress) -> TokenizerInfo:
        info = write_tokenizer(self.checkpoint, directory, progress.warn)
        if self.checkpoint.chat_template is None:
            progress.warn(f"{self.checkpoint.ref} has no chat template: the engine serves completions, not chats.")
        if not self.checkpoint.special_tokens.end:
            progress.warn(f"{self.checkpoint.ref} names no end-of-text token: answers end at max_tokens only.")
        return info


class BuildTarget(ABC, Generic[C_contra]):
    """A target's module exports one as `target`."""

    name: TargetName

    @abstractmethod
    def prepare(self, spec: BuildSpec, checkpoint: C_contra) -> TargetJob[Any]:
        """The job, once. Whatever cannot work on any machine is refused here, before any work; config.json is enough.

        Raises InputError, CheckpointError, VersionMismatchError or MissingDependencyError.
        """


def get_target(name: TargetName) -> BuildTarget[Checkpoint]:
    """The target of that name; each module exports it as `target`."""
    target: BuildTarget[Checkpoint] = importlib.import_module(f"llmops.build.targets.{name}").target
    return target
