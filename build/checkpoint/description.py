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
    """A file's device and inode, and when content and inode last changed, in nanoseconds."""

    device: int
    inode: int
    modified: int
    changed: int


class FileState(NamedTuple):
    """The status of a path, of the file that it leads to, and of the folders of both.

    One of them changes when path or file is written, replaced or renamed.
    """

    path: FileStatus
    file: FileStatus
    folders: tuple[FileStatus, FileStatus]


@dataclass(frozen=True)
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
        """Return the number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointFile:
    """A file that the build reads.

    `path` is relative to the checkpoint, `location` the path on this machine.
    """

    path: str
    location: Path
    bytes: int

    @property
    def sha256(self) -> str:
        """Return the digest, cached for as long as size and modification time stay the same."""
        return sha256_of(self.location)


@dataclass(frozen=True)
class ExistingQuantisation:
    """The quantisation that a checkpoint already has. `detail` is the file's own description."""

    method: Literal["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "bitsandbytes", "mxfp4", "gguf", "other"]
    bits: int | None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def format(self) -> QuantFormat | None:
        """Return the format in llmops' table, or None if the table has none."""
        if self.method == "modelopt":
            algorithm = str(self.detail.get("quant_algo") or "")
            # ModelOpt's name, for which TensorRT-LLM takes its own (`tensorrt_llm/llmapi/llm_utils.py`)
            return format_of_algorithm("FP8_BLOCK_SCALES" if algorithm == "fp8_pb_wo" else algorithm)
        if self.method == "compressed-tensors":
            return format_of_algorithm(compressed_tensors_algorithm(self.detail) or "")
        return format_of_method(self.method)


def compressed_tensors_algorithm(description: Mapping[str, Any]) -> str | None:
    """Return TensorRT-LLM's QuantAlgo for a compressed-tensors description, or None.

    Only descriptions of FP8 weights have one.

    One group of layers, weights per output channel with inputs per token, or both in blocks of 128:
    what `update_quant_config_from_compressed_tensors` of
    `tensorrt_llm/models/quant_config_utils.py` takes.
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
    """The special token ids of a checkpoint. Each token of `end` ends a generation."""

    bos: int | None
    end: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True, kw_only=True)
class ModelCheckpoint:
    """The facts about a checkpoint of any kind of model.

    `ref` is what the user typed. `path` is the folder, or the GGUF file itself. `config` is the
    Hugging Face config.json (for GGUF the same keys, from its metadata). `states` are those of
    `reject_outside_symlinks`.
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
        """Return the Hugging Face class."""
        return str(self.config["architectures"][0])

    @property
    def dtype(self) -> str:
        """Return the dtype of the largest tensor."""
        largest = max(self.tensors.values(), key=lambda tensor: tensor.nbytes)
        return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(largest.dtype, largest.dtype)

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(tensor.numel for tensor in self.tensors.values())

    def source(self) -> Source:
        """Return the manifest's record. Hashes every file, once (see `CheckpointFile.sha256`)."""
        from llmops.build.engine_folder.manifest import Source, SourceFile

        hashed = [SourceFile(path=f.path, bytes=f.bytes, sha256=f.sha256) for f in self.files]
        return Source(checkpoint=self.ref, format=self.format, files=hashed)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(ModelCheckpoint):
    """A checkpoint of a decoder, as it is known before its weights are read.

    `build`, `plan` and `quantize` start from this record.

    `weight_files` are relative to the checkpoint.
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
        """Return the dtype of unquantised weights."""
        return self.architecture.dtype

    @cached_property
    def weight_bytes(self) -> int:
        """Return the stored size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def parameters(self) -> int:
        """Return the number of weights."""
        return super().parameters

    def location(self, relative: str) -> Path:
        """Return the path of the checkpoint's file `relative` on this machine."""
        return next(file.location for file in self.files if file.path == relative)
