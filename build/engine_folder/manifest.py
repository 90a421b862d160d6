"""engine.json, the description of an engine folder.

It is the only file of a build that later stages read.
"""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from llmops.build.engine_folder.manifest_extras import AdapterEntry, ManifestExtra, NvidiaExtra, extra_type
from llmops.build.target_facts import TargetName
from llmops.errors import InputError, first_validation_error
from llmops.untrusted_text import is_safe_text, json_texts

E = TypeVar("E", bound=ManifestExtra)
FILE_NAME = "engine.json"
FORMAT: Literal[1] = 1
#: Maximum size of engine.json in bytes. Golden answers of the largest models take some 100 KiB.
_MAX_BYTES = 4 << 20
#: Maximum number of files of an engine: twice that of a checkpoint.
_MAX_FILES = 1 << 15
#: Maximum number of GPUs along one axis of parallelism: ten times the largest in use.
_MAX_GPUS = 4096
#: Maximum number of tokens in one sequence or engine step: ten times the largest in use.
_MAX_TOKENS = 1 << 27
#: Maximum number of entries of a vocabulary: ten times the largest in use.
_MAX_VOCABULARY = 1 << 24
#: Maximum number of sequences in one batch. Servers keep a record for each sequence, and the largest
#: number in use is 8192.
_MAX_BATCH = 1 << 16
#: Maximum size in bytes of a file whose content is checked before a start. Tokenizers and graphs take
#: up to 40 MiB; the weights of a large model would take minutes to read.
_MAX_DIGESTED = 64 << 20
#: Maximum number of bytes of files whose content is checked before a start. Takes two seconds.
_MAX_CHECKED = 1 << 30
#: Names of what servers read beside the model and the tokenizer: LoRA adapters, and the tokenizer of
#: TensorRT-LLM's grammars.
_BESIDE = ("lora", "lora_prefetch", "xgrammar_tokenizer_info.json")
_Gpus = Annotated[int, Field(ge=1, le=_MAX_GPUS)]
_Tokens = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
_Id = Annotated[int, Field(ge=0, lt=_MAX_VOCABULARY)]


def _inside(value: str) -> str:
    path = PurePosixPath(value)
    if str(path) != value or path.is_absolute() or ".." in path.parts or not value.isprintable():
        raise ValueError("must be a folder inside the engine folder")
    return value


#: The path of a folder, relative to the engine folder.
_Inside = Annotated[str, AfterValidator(_inside)]


class _ManifestModel(BaseModel):
    # JSON has no NaN, so an engine.json with NaN could not be read again.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def measure_files(directory: Path, *folders: str) -> dict[str, int | str]:
    """Return the SHA-256 of each file in `folders` of `directory`, or the size in bytes of a large file.

    The files of adapters and grammars are among them.
    """
    roots = [directory / name for name in (*folders, *_BESIDE)]
    paths = (path for root in roots for path in sorted((root, *root.rglob("*"))) if path.is_file())
    return {path.relative_to(directory).as_posix(): _measure(path) for path in paths}


def _measure(path: Path) -> int | str:
    size = path.stat().st_size
    return size if size > _MAX_DIGESTED else hashlib.sha256(path.read_bytes()).hexdigest()


class SourceFile(_ManifestModel):
    """An input file of the build.

    `path` is relative to the checkpoint, `bytes` is the file's size.
    """

    path: str
    bytes: int
    sha256: str


class Source(_ManifestModel):
    """The origin of the weights: the checkpoint as the user typed it, and every file that was read."""

    checkpoint: str
    format: Literal["huggingface", "gguf"]
    files: list[SourceFile]


class EngineLimits(_ManifestModel):
    """The limits that the engine was built for.

    `max_batch_size` is in sequences. `max_seq_len`, prompt and answer together, and
    `max_num_tokens`, per step, are in tokens.
    """

    max_batch_size: Annotated[int, Field(ge=1, le=_MAX_BATCH)]
    max_seq_len: _Tokens
    max_num_tokens: _Tokens


class TokenizerInfo(_ManifestModel):
    """The tokenizer of the engine.

    `directory`, relative to the engine folder, holds tokenizer.json, tokenizer_config.json and, for
    chat models, chat_template.jinja. `bos_id`, `end_ids` and `pad_id` are token ids; each token of
    `end_ids` ends a generation. `chat_template` is True for chat models.
    """

    directory: _Inside = "tokenizer"
    vocab_size: Annotated[int, Field(ge=1, le=_MAX_VOCABULARY)]
    bos_id: _Id | None = None
    end_ids: Annotated[list[_Id], Field(max_length=1024)]
    pad_id: _Id | None = None
    chat_template: bool


class Quantisation(_ManifestModel):
    """The number formats of the engine.

    `weights` is none, int8, int4, fp8, int4_awq, …; `kv_cache` is auto, fp8 or int8; `group_size`
    is the number of weights that share a scale, for formats with groups.
    """

    weights: str = "none"
    kv_cache: str = "auto"
    group_size: int | None = None


class RecommendedSampling(_ManifestModel):
    """The sampling settings that the model's authors recommend. Settings of a request come first.

    None means OpenAI's default.
    """

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)


class Parallelism(_ManifestModel):
    """The split of a model over `tp_size` × `pp_size` GPUs.

    `ep_size`, a divisor of `tp_size`, is the number of GPUs that share the experts.
    """

    tp_size: _Gpus = 1
    pp_size: _Gpus = 1
    ep_size: _Gpus = 1

    @property
    def world_size(self) -> int:
        """Return the number of GPUs: `tp_size` × `pp_size`."""
        return self.tp_size * self.pp_size


class GoldenAnswer(_ManifestModel):
    """The source model's greedy answer to one golden prompt.

    `ids` are the tokens that the model reads: `text` in the chat template, if the model has a chat
    template. `text_ids` are the tokens of `text` alone. `tokens` are the tokens of the answer, and
    `log_probs` the natural logarithms of their probabilities.
    """

    text: str
    ids: list[int]
    text_ids: list[int]
    tokens: list[int]
    log_probs: list[float]


class Golden(_ManifestModel):
    """The source checkpoint's answers to the golden prompts.

    `source` names the program and dtype that computed the answers.
    """

    source: str
    answers: list[GoldenAnswer]


class QualityMetrics(_ManifestModel):
    """The quality of a quantised model, measured by the build against the source model.

    `golden_agreement` is the share of greedy answer tokens that stayed the same. `weight_error` is
    the largest relative error of one weight matrix, which `weight_error_at` names. `narrowest` and
    `widest` are pairs of a ratio and a layer: the calibrated range divided by the range that the
    evaluation texts reach.
    """

    perplexity: float
    perplexity_ratio: float
    top1_agreement: float
    mean_kl: float
    worst_token_kl: float
    golden_agreement: float | None
    tokens: int
    prompts: int = 0
    weight_error: float | None = None
    weight_error_at: str = ""
    narrowest: tuple[float, str] | None = None
    widest: tuple[float, str] | None = None


class EngineManifest(_ManifestModel):
    """The content of engine.json.

    `key` is the SHA-256 of all inputs of the build.

    `complete` is False while a step is left for `llmops build --resume`. `contents` has the SHA-256
    of each file that servers read, or the size in bytes of a file of more than 64 MiB.
    `files` has the paths of all files but engine.json. Both are empty in engines of earlier builds.
    """

    format: Literal[1] = FORMAT
    key: str
    name: str
    target: TargetName
    architecture: str
    model_dir: _Inside = "model"
    source: Source
    versions: dict[str, str]
    quantisation: Quantisation = Quantisation()
    parallelism: Parallelism = Parallelism()
    limits: EngineLimits
    tokenizer: TokenizerInfo
    sampling: RecommendedSampling = RecommendedSampling()
    complete: bool = True
    contents: dict[_Inside, int | str] = Field(default_factory=dict, max_length=_MAX_FILES)
    files: Annotated[list[str], Field(max_length=_MAX_FILES)] = []
    plan: dict[str, Any] | None = None
    quality: QualityMetrics | None = None
    golden: Golden | None = None
    extra: SerializeAsAny[ManifestExtra] = Field(default_factory=dict, validate_default=True)

    @field_validator("extra", mode="before")
    @classmethod
    def _extra_of_target(cls, value: Any, info: ValidationInfo) -> Any:
        """Parse `extra` with the pydantic model of `target`, a field that is validated earlier."""
        if isinstance(value, ManifestExtra) or not isinstance(value, dict) or "target" not in info.data:
            return value
        try:
            return extra_type(info.data["target"], value).model_validate(value)
        except ValidationError as error:
            raise PydanticCustomError("extra", "{problem}", {"problem": first_validation_error(error)}) from None

    @field_validator("*", mode="before")
    @classmethod
    def _check_texts(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject control characters: commands print these texts. Golden prompts have line breaks.

        This validator is defined last, because pydantic runs the last validator first.
        """
        if info.field_name != "golden" and not all(map(is_safe_text, json_texts(value, names=True))):
            raise ValueError("it has a control character or an invisible character")
        return value

    @field_serializer("extra")
    def _as_given(self, extra: ManifestExtra) -> dict[str, Any]:
        return extra.model_dump(mode="json", exclude_unset=True)

    @model_serializer(mode="wrap")
    def _without_unknown_files(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        for name in ("contents", "files"):
            if not fields[name]:
                del fields[name]
        return fields

    def extra_as(self, kind: type[E]) -> E:
        """Return `extra`, which must be of the class `kind`.

        Raises:
            TypeError: The engine was built for another target.
        """
        if not isinstance(self.extra, kind):
            raise TypeError(f"an engine of target {self.target} has no {kind.__name__}")
        return self.extra

    @property
    def tensorrt_llm(self) -> str:
        """Return the TensorRT-LLM version that the engine needs, or an empty text."""
        return self.extra.tensorrt_llm if isinstance(self.extra, NvidiaExtra) else ""

    @property
    def adapters(self) -> list[AdapterEntry]:
        """Return the LoRA adapters that the engine serves."""
        return self.extra.adapters if isinstance(self.extra, NvidiaExtra) else []

    @property
    def quality_limits(self) -> dict[str, Any]:
        """Return the limits of the quality gate that the user set, by name."""
        return self.extra.quality_limits if isinstance(self.extra, NvidiaExtra) else {}

    def check_files(self, directory: Path) -> None:
        """Raise InputError for the first file of `contents` that is missing or damaged.

        Of large files, only the sizes are checked, which finds copies that stopped early. Small
        files after the first GiB must only exist.
        """
        left = _MAX_CHECKED
        for path, measure in self.contents.items():
            file = directory / path
            size = file.stat().st_size if isinstance(measure, str) and file.is_file() else 0
            left -= size
            # A file of more bytes was not small when the build wrote it.
            unread = left < 0 and isinstance(measure, str) and size <= _MAX_DIGESTED
            found = (measure if unread else _measure(file)) if file.is_file() else None
            if found != measure:
                fault = "is missing" if found is None else "is not as the build wrote it"
                raise InputError(f"{file} {fault}, so the engine is damaged: copy it again, or build it again.")

    def added_files(self, directory: Path) -> list[Path]:
        """Return the files and links in the folders of model, tokenizer and adapters that no build wrote.

        A server may load such files, for instance a chat template. Folders of which the build
        recorded no file are left out.
        """
        folders = [
            folder for folder in (self.model_dir, self.tokenizer.directory, *_BESIDE)
            if any((directory / path).is_relative_to(directory / folder) for path in self.contents)
        ]  # fmt: skip
        recorded = {directory / path for path in (*self.contents, FILE_NAME)}
        found = {path for folder in folders for path in (directory / folder).rglob("*")}
        return sorted(path for path in found - recorded if path.is_symlink() or not path.is_dir())

    def save(self, directory: Path) -> None:
        """Write engine.json into the folder `directory`."""
        (directory / FILE_NAME).write_text(self.text())

    def text(self) -> str:
        """Return the text of engine.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the manifest of an engine folder.

        Raises:
            InputError: The folder is not an engine folder, or its engine.json has another format.
        """
        path = directory / FILE_NAME
        if not path.is_file():
            raise InputError(f"{directory} is not an engine folder (no {FILE_NAME}). Make one with `llmops build`.")
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(
                f"{path} has more than {_MAX_BYTES >> 20} MiB, so llmops did not write it. Build the engine again."
            )
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            fault = first_validation_error(error, "the file")
            raise InputError(
                f"{path} cannot be read ({fault}); it was edited, or written by another version of llmops. "
                "Build the engine again."
            ) from error
