"""The description of a checkpoint.

Every source (folder, GGUF file, hub) is opened as a `Checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmops.build.checkpoint.hashing import sha256_of
from llmops.build.quant_formats import QuantFormat, format_of_algorithm, format_of_method

if TYPE_CHECKING:
    from llmops.build.engine_folder.manifest import Source
    from llmops.build.model.architecture import Architecture

CheckpointFormat = Literal["huggingface", "gguf"]


class FileStatus(NamedTuple):
    """The device and inode of a file, and the times of its last changes.

    Attributes:
        device: The number of the file system's device.
        inode: The number of the inode on `device`.
        modified: The last change of the content, in nanoseconds since 1970.
        changed: The last change of the inode, in nanoseconds since 1970.
    """

    device: int
    inode: int
    modified: int
    changed: int


class FileState(NamedTuple):
    """The status of a path, of the file that the path leads to, and of the folders of both.

    At least one status changes when the path or the file is written, replaced or renamed.
    """

    path: FileStatus
    file: FileStatus
    folders: tuple[FileStatus, FileStatus]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor. `shape` is row-major (out_features, in_features), also for GGUF.

    `dtype` is the file's own name: F32, BF16, F8_E4M3 … (safetensors), Q4_1, Q6_K … (GGUF).
    `offset` counts bytes from the start of `file`, which is relative to the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    offset: int

    @property
    def numel(self) -> int:
        """Return the number of values in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointFile:
    """A file that the build reads.

    `path` is relative to the checkpoint, `location` is the path on this machine, and `bytes` is the
    size of the file.
    """

    path: str
    location: Path
    bytes: int

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the file when it was first asked for, as hex digits."""
        return sha256_of(self.location)

    @property
    def is_copied(self) -> bool:
        """Return True if builds copy the file and make no hard links to it.

        An edit of an engine's settings, templates and notes leaves the checkpoint as it is.
        """
        return Path(self.path).suffix in (".json", ".jinja", ".md", ".txt")

    @property
    def digest_if_linked(self) -> str | None:
        """Return the SHA-256 of the file, or None if builds make no hard links to it."""
        return None if self.is_copied else self.sha256


@dataclass(frozen=True)
class ExistingQuantisation:
    """The quantisation of a checkpoint's stored weights.

    `bits` are the bits per weight, or None if the files do not say. `detail` is the description
    that the files give, unchanged.
    """

    method: Literal["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "bitsandbytes", "mxfp4", "gguf", "other"]
    bits: int | None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def format(self) -> QuantFormat | None:
        """Return the row of the format in `quant_formats`, or None if the format has no row."""
        if self.method == "modelopt":
            algorithm = str(self.detail.get("quant_algo") or "")
            # TensorRT-LLM translates this name of ModelOpt, since 1.3 also in capitals
            # (`tensorrt_llm/quantization/modelopt_config.py`, canonicalize_quant_algo).
            return format_of_algorithm("FP8_BLOCK_SCALES" if algorithm.lower() == "fp8_pb_wo" else algorithm)
        if self.method == "compressed-tensors":
            return format_of_algorithm(compressed_tensors_algorithm(self.detail) or "")
        return format_of_method(self.method)

    @property
    def kv_cache_algorithm(self) -> str | None:
        """Return the algorithm of the KV cache that ModelOpt's description names, or None.

        ModelOpt 1.x and descriptions in config.json have a `kv_cache_scheme`, which TensorRT-LLM
        1.3 translates (`tensorrt_llm/quantization/modelopt_config.py`, _kv_cache_scheme_to_algo).
        """
        scheme = self.detail.get("kv_cache_scheme")
        if isinstance(scheme, Mapping):
            return _SCHEMES.get((scheme.get("type"), scheme.get("num_bits")))
        return scheme.upper() if isinstance(scheme, str) else self.detail.get("kv_cache_quant_algo")

    @property
    def algorithms(self) -> set[str]:
        """Return ModelOpt's algorithms of the weights, of the whole checkpoint and of single layers."""
        layers = self.detail.get("quantized_layers")
        named = [self.detail, *(layers.values() if isinstance(layers, Mapping) else ())]
        return {str(one["quant_algo"]) for one in named if isinstance(one, Mapping) and one.get("quant_algo")}


#: Type and bits of a `kv_cache_scheme` -> TensorRT-LLM's name of the algorithm.
_SCHEMES: dict[tuple[Any, Any], str] = {("float", 8): "FP8", ("float", 4): "NVFP4", ("int", 8): "INT8"}


def compressed_tensors_algorithm(description: Mapping[str, Any]) -> str | None:
    """Return TensorRT-LLM's QuantAlgo for a compressed-tensors description, or None.

    TensorRT-LLM accepts FP8 weights in one group of layers, scaled per output channel with inputs
    scaled per token, or both scaled in blocks of 128. The rule is
    `update_quant_config_from_compressed_tensors` of `tensorrt_llm/models/quant_config_utils.py`.
    """
    groups = [group for group in (description.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    if len(groups) != 1:
        return None
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        return None
    strategies = (weights.get("strategy"), inputs.get("strategy"))
    if strategies == ("channel", "token"):
        return "FP8_PER_CHANNEL_PER_TOKEN"
    return "FP8_BLOCK_SCALES" if strategies == ("block", "group") and inputs.get("group_size") == 128 else None


@dataclass(frozen=True)
class SpecialTokens:
    """The special token ids of a checkpoint: begin, end and padding.

    Each token of `end` ends a generation. `bos` or `pad` is None if the checkpoint has no such
    token.
    """

    bos: int | None
    end: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True, kw_only=True)
class ModelCheckpoint:
    """The facts about a checkpoint of any kind of model.

    `name` is the model's short name. `tensors` maps the name of each tensor to its description.

    `ref` is the path or name that the user typed. `path` is the folder, or the GGUF file itself.
    `config` is the Hugging Face config.json (for GGUF the same keys, from its metadata). `states`
    has the state of each file before the checks, by its path in the folder.
    """

    ref: str
    path: Path
    name: str
    format: CheckpointFormat = "huggingface"
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    files: tuple[CheckpointFile, ...]
    states: dict[str, FileState | None] = field(default_factory=dict, repr=False)

    @property
    def hf_class(self) -> str:
        """Return the model's class in transformers, such as LlamaForCausalLM."""
        return str(self.config["architectures"][0])

    @property
    def dtype(self) -> str:
        """Return the dtype of the largest tensor, such as bfloat16."""
        largest = max(self.tensors.values(), key=lambda tensor: tensor.nbytes)
        return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(largest.dtype, largest.dtype)

    @property
    def parameters(self) -> int:
        """Return the number of stored weights."""
        return sum(tensor.numel for tensor in self.tensors.values())

    def source(self) -> Source:
        """Return the record of the checkpoint in the engine's manifest.

        Every file is hashed, unless its digest is cached (see `CheckpointFile.sha256`).
        """
        from llmops.build.engine_folder.manifest import Source, SourceFile

        hashed = [SourceFile(path=f.path, bytes=f.bytes, sha256=f.sha256) for f in self.files]
        return Source(checkpoint=self.ref, format=self.format, files=hashed)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(ModelCheckpoint):
    """A checkpoint of a decoder, as it is known before its weights are read.

    `build`, `plan` and `quantize` start from this record. `weight_files` and `tokenizer_files` are
    paths relative to the checkpoint. `metadata` is the metadata of a GGUF file, under the file's
    own keys.
    """

    architecture: Architecture
    weight_files: tuple[str, ...]
    tokenizer_files: tuple[str, ...]
    special_tokens: SpecialTokens
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    quantisation: ExistingQuantisation | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def dtype(self) -> str:
        """Return the dtype of unquantised weights, such as bfloat16."""
        return self.architecture.dtype

    @property
    def kept_quantisation(self) -> ExistingQuantisation | None:
        """Return the quantisation that an engine keeps: None for GGUF, which is dequantised."""
        return None if self.format == "gguf" else self.quantisation

    @cached_property
    def weight_bytes(self) -> int:
        """Return the stored size of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def parameters(self) -> int:
        """Return the number of stored weights."""
        return super().parameters

    def location(self, relative: str) -> Path:
        """Return the path of the checkpoint's file `relative` on this machine."""
        return next(file.location for file in self.files if file.path == relative)
