"""Measured step times of one host.

`llmops verify --calibrate FILE` writes them and `llmops plan --measured FILE` reads them.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmops.build.engine_folder.manifest import Parallelism
from llmops.errors import InputError, first_validation_error
from llmops.input_files import read_json
from llmops.output_files import write_text

FORMAT: Literal[1] = 1
Phase = Literal["prefill", "decode"]


class _MeasuredModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepTime(_MeasuredModel):
    """The measured duration of one kind of engine step.

    In the step, `batch_size` sequences process `tokens` new tokens together (in a decode step, one
    token each). Each sequence has `context` tokens in the KV cache. `seconds` is the median of
    `samples` measurements at the engine's Triton model, without gateway and HTTP.
    """

    phase: Phase
    batch_size: int = Field(ge=1)
    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0)
    samples: int = Field(ge=1, default=1)


class MeasuredSteps(_MeasuredModel):
    """The measured step times of one engine on one kind of device.

    `device` is the name of the GPU from its driver (`NVIDIA H100 80GB HBM3`), or the name of the
    CPU. `gpu` is the planner's name (`h100-sxm`), or None if the engine was built without a plan.
    `architecture` is the model's class in transformers. `quantisation` and `kv_cache_dtype` have
    the values of engine.json.
    """

    format: Literal[1] = FORMAT
    device: str
    gpu: str | None = None
    model: str
    architecture: str
    target: str
    quantisation: str
    kv_cache_dtype: str
    layout: Parallelism = Parallelism()
    versions: dict[str, str] = Field(default_factory=dict)
    steps: list[StepTime] = Field(min_length=1)

    def of_phase(self, phase: Phase) -> list[StepTime]:
        """Return the steps of one phase, sorted by batch size, tokens and context."""
        found = (step for step in self.steps if step.phase == phase)
        return sorted(found, key=lambda step: (step.batch_size, step.tokens, step.context))

    def save(self, path: Path) -> None:
        """Write the file. Raises InputError if it cannot be written."""
        write_text(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            InputError: The file is missing, or a field has a wrong value. The message names the
                field.
        """
        advice = f"measure a host with `llmops verify --calibrate {path.name}`."
        try:
            return cls.model_validate(read_json(path))
        except FileNotFoundError:
            raise InputError(f"{path} does not exist; {advice}") from None
        except ValidationError as error:
            fault = first_validation_error(error, "the file")
            raise InputError(f"{path} does not hold measured step times ({fault}); {advice}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not JSON ({error}); {advice}") from error
