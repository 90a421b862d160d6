"""The interface of build targets.

`BuildTarget.prepare` checks a spec and returns the `TargetJob` that builds it. `get_target` imports
the module of a target when it is first used.
"""

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.description import ModelCheckpoint
from llmops.build.checkpoint.file_checks import reject_changed_files
from llmops.build.engine_folder.manifest import (
    EngineLimits,
    Golden,
    Parallelism,
    Quantisation,
    RecommendedSampling,
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
    """The result of a build job, for engine.json. The files are in `workdir / model_dir`.

    `complete` is False if a step that needs other hardware is left. `extra` then has the command of
    this step.
    """

    limits: EngineLimits
    extra: ManifestExtra
    quantisation: Quantisation = field(default_factory=Quantisation)
    parallelism: Parallelism = field(default_factory=Parallelism)
    model_dir: str = "model"
    complete: bool = True
    quality: dict[str, Any] | None = None
    golden: Golden | None = None


@dataclass(frozen=True)
class StageRequirements:
    """The memory, disk space and time that one stage needs.

    `ram`, `gpu` and `disk` are in bytes. `gpu` is the sum over all GPUs, or 0 for a stage without
    GPUs. `minutes` is a rough estimate, or None for a stage that does not end. `here` is True if
    this command runs the stage.
    """

    stage: str
    ram: int
    gpu: int
    disk: int
    minutes: float | None = None
    here: bool = False

    def line(self) -> str:
        """Return the requirements as a line of the table below HEADER."""
        gpu = f"{self.gpu / _GIB:8.1f} GiB" if self.gpu else "       none"
        time = "" if self.minutes is None else f"{max(math.ceil(self.minutes), 1):>6} min"
        return f"{self.stage:<28} {self.ram / _GIB:8.1f} GiB {gpu} {self.disk / _GIB:8.1f} GiB {time}".rstrip()


#: Header of the table of `StageRequirements.line`.
HEADER = f"{'stage':<28} {'memory':>12} {'all GPUs':>11} {'disk':>12} {'about':>10}"


C = TypeVar("C", bound=ModelCheckpoint)
C_contra = TypeVar("C_contra", bound=ModelCheckpoint, contravariant=True)


class TargetJob(ABC, Generic[C]):
    """A build with a checked specification. `check` tests whether this machine can run the build.

    Import heavy libraries inside `build` only.
    """

    def __init__(self, spec: BuildSpec, checkpoint: C) -> None:
        self.spec, self.checkpoint = spec, checkpoint

    @property
    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the libraries whose version changes the engine: distribution name -> version.

        The method imports none of these libraries.
        """

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Return an upper estimate of the bytes that `build` writes, including temporary files."""

    @property
    def kept_bytes(self) -> int:
        """Return the part of `disk_bytes` that an earlier, unfinished build has already written.

        The method hashes the checkpoint.
        """
        return 0

    @property
    def stage_requirements(self) -> Sequence[StageRequirements]:
        """Return the requirements of each stage, or an empty list if no stage needs much."""
        return ()

    @property
    def dry_run_lines(self) -> list[str]:
        """Return the lines of --dry-run that describe this job."""
        return []

    def reject_changed_inputs(self) -> None:
        """Raise CheckpointError if a checkpoint file changed since its links were checked."""
        checkpoint = self.checkpoint
        folder = checkpoint.path.parent if checkpoint.format == "gguf" else checkpoint.path
        reject_changed_files(folder, checkpoint.states, {file.path: file.digest_if_linked for file in checkpoint.files})

    def check(self) -> None:
        """Check that the job can run on this machine.

        Raises:
            MissingDependencyError, VersionMismatchError, ResourceError: This machine cannot run the
            job.
        """
        return

    def inspect(self) -> None:
        """Check the files beside the weights, without reading weights.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        return

    @property
    def sampling(self) -> RecommendedSampling:
        """Return the sampling settings that the model's authors recommend."""
        return RecommendedSampling()

    @abstractmethod
    def write_tokenizer(self, directory: Path, progress: Progress) -> TokenizerInfo:
        """Write the tokenizer folder of the engine into `directory`.

        Raises:
            CheckpointError: The tokenizer is damaged, or belongs to another model.
        """

    @abstractmethod
    def build(self, workdir: Path, progress: Progress) -> BuildResult:
        """Write the engine into `workdir / model_dir`.

        `workdir / "tokenizer"` exists already. The caller adds engine.json and moves workdir into
        place, or removes it on errors.

        Raises:
            BuildError: The build failed.
        """


def sampling_defaults(checkpoint: Checkpoint) -> RecommendedSampling:
    """Return the sampling fields of generation_config.json. As in vLLM, `do_sample` is ignored.

    Raises:
        CheckpointError: A value is outside the range that engines accept.
    """
    values = {name: checkpoint.generation_config.get(name) for name in RecommendedSampling.model_fields}
    if values["top_k"] == -1:
        values["top_k"] = 0
    try:
        return RecommendedSampling.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{checkpoint.ref}: generation_config.json: {first['loc'][0]} is {first['input']!r} "
            f"({explain_error(first)}); correct it or remove the line."
        ) from error


class GeneratorJob(TargetJob[Checkpoint]):
    """A build of a model that generates text."""

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
            progress.warn(f"{self.checkpoint.ref} names no end-of-text token: answers end only at max_tokens.")
        return info


class BuildTarget(ABC, Generic[C_contra]):
    """A build target. The module of each subclass exports an instance as `target`."""

    name: TargetName

    @abstractmethod
    def prepare(self, spec: BuildSpec, checkpoint: C_contra) -> TargetJob[Any]:
        """Return the job for this specification.

        The method rejects every specification that cannot work on any machine, and needs only
        config.json of the checkpoint.

        Raises:
            InputError, CheckpointError, VersionMismatchError, MissingDependencyError: The build is
                not possible.
        """


def get_target(name: TargetName) -> BuildTarget[Checkpoint]:
    """Return the target called `name`. The module of a target is imported on first use."""
    target: BuildTarget[Checkpoint] = importlib.import_module(f"llmops.build.targets.{name}").target
    return target
