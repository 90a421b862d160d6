"""A planned engine, in the form that `llmops build --plan` reads and engine.json keeps."""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from llmops.build.model.architecture import Architecture
from llmops.build.quant_formats import FORMATS
from llmops.build.target_facts import TargetName
from llmops.errors import InputError, first_validation_error
from llmops.input_files import read_json
from llmops.output_files import write_text

FORMAT: Literal[1] = 1


class BuildPlan(BaseModel):
    """The engine of one replica, and the number of replicas. Lengths are in tokens.

    `quantisation` and `kv_cache_dtype` have the values of `llmops plan --quant` and `--kv-dtype`.
    `predicted` holds the planner's estimates in seconds, requests/s and bytes. `settings` are the
    settings of a recipe for `build --set`; the command line may override them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = FORMAT
    model: str
    architecture: str
    hidden_size: int
    num_layers: int
    target: TargetName
    gpu: str
    quantisation: str
    kv_cache_dtype: str = Field(pattern="^(bf16|fp8|int8)$")
    group_size: int | None = None
    tp_size: int = Field(ge=1)
    pp_size: int = Field(ge=1)
    ep_size: int = Field(ge=1)
    max_batch_size: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    kv_cache_fraction: float = Field(gt=0, lt=1)
    tokens_per_block: int = 32
    chunked_prefill: bool = True
    replicas: int = Field(ge=1, default=1)
    predicted: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("quantisation")
    @classmethod
    def _known_format(cls, name: str) -> str:
        if name not in FORMATS:
            raise ValueError(f"the format is unknown; choose one of {', '.join(FORMATS)}")
        return name

    @property
    def world_size(self) -> int:
        """Return the number of GPUs of one replica."""
        return self.tp_size * self.pp_size

    def check(self, model: Architecture) -> None:
        """Raise InputError if the plan was made for a model with other shapes than `model`."""
        planned = f"{self.architecture}, {self.num_layers} layers of {self.hidden_size}"
        actual = f"{model.hf_class}, {model.num_layers} layers of {model.hidden_size}"
        if planned != actual:
            raise InputError(
                f"The plan is for {self.model} ({planned}), not for this checkpoint ({actual}); make a plan for this "
                "checkpoint."
            )

    def build_options(self) -> dict[str, Any]:
        """Return the options of `llmops build` that this plan sets, by name.

        The weights of a checkpoint that is already quantised (fp8_block, mxfp4) are built
        unchanged.
        """
        quant_format = FORMATS.get(self.quantisation)
        return {
            "target": self.target,
            "quant": "none" if quant_format and quant_format.as_stored else self.quantisation,
            "kv_cache": "auto" if self.kv_cache_dtype == "bf16" else self.kv_cache_dtype,
            "group_size": self.group_size,
            "tp": self.tp_size,
            "pp": self.pp_size,
            "ep": self.ep_size,
            "gpu": self.gpu,
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.max_num_tokens,
            "max_seq_len": self.max_seq_len,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return self.model_dump()

    @classmethod
    def from_dict(cls, data: Any, source: str = "the plan") -> Self:
        """Parse a plan. `source` names the plan in error messages.

        Raises:
            InputError: A field is missing or has an impossible value. The message names the field.
        """
        if isinstance(data, dict) and "plan" in data:
            data = data["plan"]
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InputError(
                f"{source} is not a build plan ({first_validation_error(error, 'the file')}); make one with "
                "`llmops plan … --save plan.json`."
            ) from error

    def save(self, path: Path) -> None:
        """Write the plan as JSON.

        Raises:
            InputError: The file cannot be written.
        """
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `llmops plan --save` or `--json` wrote.

        Raises:
            InputError: The file is missing or not a plan.
        """
        try:
            data = read_json(path)
        except FileNotFoundError:
            raise InputError(f"{path} does not exist; make one with `llmops plan … --save {path.name}`.") from None
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path} is not JSON ({error}); make one with `llmops plan … --save {path.name}`."
            ) from error
        return cls.from_dict(data, str(path))
