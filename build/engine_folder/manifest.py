"""engine.json: what an engine folder is. The only thing that later stages read of a build."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from pydantic_core import PydanticCustomError

from llmops.build.engine_folder.extras import AdapterEntry, Extra, NvidiaExtra, extra_type
from llmops.build.target_names import TargetName
from llmops.errors import InputError, first_fault

E = TypeVar("E", bound=Extra)
FILE_NAME = "engine.json"
FORMAT: Literal[1] = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceFile(_Part):
    """One input file of the build; `path` is relative to the checkpoint."""

    path: str
    bytes: int
    sha256: str


class Source(_Part):
    """Where the weights came from: what the user typed, and every file that was read."""

    checkpoint: str
    format: Literal["huggingface", "gguf"]
    files: list[SourceFile]


class EngineLimits(_Part):
    """What the engine was built for. Lengths in tokens."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int


class TokenizerInfo(_Part):
    """`directory` (relative to the engine) holds tokenizer.json, tokenizer_config.json and, for chat models,
    chat_template.jinja. Ids are token ids; `end_ids` all end a generation."""

    directory: str = "tokenizer"
    vocab_size: int
    bos_id: int | None = None
    end_ids: list[int]
    pad_id: int | None = None
    chat_template: bool


class Quantisation(_Part):
    """`weights`: none, int8, int4, fp8, int4_awq, …; `kv_cache`: auto, fp8, int8; `group_size` for int4."""

    weights: str = "none"
    kv_cache: str = "auto"
    group_size: int | None = None


class SamplingDefaults(_Part):
    """How the model's makers want it sampled, for requests that do not say; unset fields are OpenAI's defaults."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)


class Parallelism(_Part):
    """GPUs = tp_size * pp_size; ep_size divides tp_size (experts)."""

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size


class GoldenAnswer(_Part):
    """What the source says to one prompt. `ids` is what the model reads (the chat template's rendering where there is
    one), `text_ids` the text alone; `tokens` are its greedy ones, `log_probs` theirs (natural logarithm)."""

    text: str
    ids: list[int]
    text_ids: list[int]
    tokens: list[int]
    log_probs: list[float]


class Golden(_Part):
    """The source checkpoint's answers to the golden prompts; `source` says what computed them."""

    source: str
    answers: list[GoldenAnswer]


class EngineManifest(_Part):
    """The contents of engine.json. `key` is the SHA-256 of all that went into the build."""

    format: Literal[1] = FORMAT
    key: str
    name: str
    target: TargetName
    architecture: str
    model_dir: str = "model"
    source: Source
    versions: dict[str, str]
    quantisation: Quantisation = Quantisation()
    parallelism: Parallelism = Parallelism()
    limits: EngineLimits
    tokenizer: TokenizerInfo
    sampling: SamplingDefaults = SamplingDefaults()
    complete: bool = True
    plan: dict[str, Any] | None = None
    quality: dict[str, Any] | None = None
    golden: Golden | None = None
    extra: SerializeAsAny[Extra] = Field(default_factory=dict, validate_default=True)

    @field_validator("extra", mode="before")
    @classmethod
    def _extra_of_target(cls, value: Any, info: ValidationInfo) -> Any:
        """The model of the target, which is read before it."""
        if isinstance(value, Extra) or not isinstance(value, dict) or "target" not in info.data:
            return value
        try:
            return extra_type(info.data["target"], value).model_validate(value)
        except ValidationError as error:
            raise PydanticCustomError("extra", "{problem}", {"problem": first_fault(error)}) from None

    @field_serializer("extra")
    def _as_given(self, extra: Extra) -> dict[str, Any]:
        return extra.model_dump(mode="json", exclude_unset=True)

    def extra_as(self, kind: type[E]) -> E:
        """`extra` as the model of its target; TypeError where it is that of another."""
        if not isinstance(self.extra, kind):
            raise TypeError(f"an engine of target {self.target} has no {kind.__name__}")
        return self.extra

    @property
    def tensorrt_llm(self) -> str:
        """The TensorRT-LLM that the engine was made for; empty where it needs none."""
        return self.extra.tensorrt_llm if isinstance(self.extra, NvidiaExtra) else ""

    @property
    def adapters(self) -> list[AdapterEntry]:
        return self.extra.adapters if isinstance(self.extra, NvidiaExtra) else []

    @property
    def quality_limits(self) -> dict[str, Any]:
        """Limits of the quality gate that the user set."""
        return self.extra.quality_limits if isinstance(self.extra, NvidiaExtra) else {}

    def save(self, directory: Path) -> None:
        (directory / FILE_NAME).write_text(self.text())

    def text(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def load(cls, directory: Path) -> EngineManifest:
        """Read an engine folder's manifest. Raises InputError when it is not one, or not of this format."""
        path = directory / FILE_NAME
        if not path.is_file():
            raise InputError(f"{directory} is not an engine folder (no {FILE_NAME}). Make one with `llmops build`.")
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            fault = first_fault(error, "the file")
            raise InputError(
                f"{path} cannot be read ({fault}); it was edited or made by another version of llmops. "
                "Build the engine again."
            ) from error
