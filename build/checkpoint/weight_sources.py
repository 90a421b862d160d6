"""Read weights one at a time by their Hugging Face name, from any kind of file.

A source keeps no weight in memory after `get`.
"""

import mmap
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from llmops.build.checkpoint import Checkpoint, TensorInfo
from llmops.build.checkpoint.file_checks import open_checked
from llmops.build.checkpoint.gguf_checkpoint import block_bits
from llmops.build.checkpoint.safetensors_header import read_header
from llmops.errors import CheckpointError

_FLOATS = {"F32": ("f32", np.float32), "F16": ("f16", np.float16), "BF16": ("bf16", np.uint16)}


@dataclass(frozen=True)
class Weight:
    """A weight in its stored form.

    `data` is float32 or float16, or uint16 with the upper halves of float32 if `element` is bf16,
    or uint8 with the blocks of each row if `blocks` names a GGML block format. `shape` is the shape
    of the values, row-major.
    """

    data: NDArray[Any]
    shape: tuple[int, ...]
    element: str
    blocks: str | None = None

    @property
    def block_bits(self) -> int | None:
        """Return the bits per value of a block format, or None for plain numbers."""
        return block_bits(self.blocks) if self.blocks else None

    def float32(self, rows: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.float32]:
        """Return the selected rows in float32. The conversion is exact for every stored form."""
        data = self.data[rows]
        if self.blocks:
            return _dequantised(data, self.blocks)
        if self.element == "bf16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float32, copy=False)


def _dequantised(data: NDArray[np.uint8], blocks: str) -> NDArray[np.float32]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(data, GGMLQuantizationType[blocks])
    except NotImplementedError as error:
        raise CheckpointError(
            f"Weights stored as {blocks} cannot be read: the gguf package cannot dequantise them; use another file "
            "of this model."
        ) from error


#: Prefixes that replace "model." in the names of the text part's weights, in Gemma 3 with encoders:
#: the published prefix, and the prefix that transformers writes since 4.52.
TEXT_PARTS = ("language_model.model.", "model.language_model.")


class WeightSource(Protocol):
    """The source of one checkpoint's weights.

    `get` raises CheckpointError if the tensor is missing, holds no floating-point values, or has
    another shape than `shape`, where it is given.
    """

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> Weight: ...

    def has(self, name: str) -> bool: ...

    def forget(self) -> None:
        """Release the memory of the pages that were read from the file.

        If a released page is needed later, the system reads the page from the file again.
        """


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """Return the weight source for the format of `checkpoint`."""
    return GgufWeights(checkpoint) if checkpoint.format == "gguf" else SafetensorsWeights(checkpoint)


class _MappedFile:
    """A file that is mapped into memory."""

    def __init__(self, path: Path, opened: BinaryIO) -> None:
        self.path = path
        with opened as file:
            if not os.fstat(file.fileno()).st_size:
                raise CheckpointError(f"{path} is empty; download it again.")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array = np.frombuffer(self.map, np.uint8)

    def bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """Return the bytes of a tensor. CheckpointError: The file was truncated since it was checked."""
        found = self.array[info.offset : info.offset + info.nbytes]
        if found.nbytes < info.nbytes:
            raise CheckpointError(f"{self.path} was truncated while the engine was built; download it again.")
        return found

    def forget(self) -> None:
        self.map.madvise(mmap.MADV_DONTNEED)


class SafetensorsFile:
    """A safetensors file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensors, self.map = path, read_header(path, path.name), _MappedFile(path, open_checked(path))

    def get(self, name: str) -> Weight | None:
        """Return a tensor, or None if the file has no such tensor in float32, float16 or bfloat16."""
        info = self.tensors.get(name)
        return _plain(info, self.map) if info is not None and info.dtype in _FLOATS else None


class SafetensorsWeights:
    """The weights of a Hugging Face folder, mapped into memory.

    A weight that is written unchanged is never copied out of the page cache.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        paths = {name: checkpoint.location(name) for name in checkpoint.weight_files}
        self.maps = {name: _MappedFile(path, open_checked(path, checkpoint.path)) for name, path in paths.items()}

    def forget(self) -> None:
        for file in self.maps.values():
            file.forget()

    def has(self, name: str) -> bool:
        return self._stored(name) in self.checkpoint.tensors

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> Weight:
        info = _find(self.checkpoint, self._stored(name), name, shape)
        if info.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.checkpoint.ref}: {name} is stored as {info.dtype} and not as "
                f"{', '.join(_FLOATS)}. Use the checkpoint before quantisation."
            )
        return _plain(info, self.maps[info.file])

    def _stored(self, name: str) -> str:
        """Return the name of a weight in the files, which may have a prefix of TEXT_PARTS."""
        others = (prefix + name.removeprefix("model.") for prefix in TEXT_PARTS if name.startswith("model."))
        return next((one for one in (name, *others) if one in self.checkpoint.tensors), name)


def _plain(info: TensorInfo, file: _MappedFile) -> Weight:
    element, dtype = _FLOATS[info.dtype]
    raw = file.bytes(info)
    if info.offset % np.dtype(dtype).itemsize:
        raw = np.array(raw)  # Older writers do not align the data section, so copy the bytes.
    return Weight(raw.view(dtype).reshape(info.shape), info.shape, element)


class GgufWeights:
    """The weights of a GGUF file, mapped into memory.

    Rows of a block format are unpacked when they are read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.file = _MappedFile(checkpoint.path, checkpoint.path.open("rb"))
        self.architecture = checkpoint.architecture

    def forget(self) -> None:
        self.file.forget()

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self.checkpoint.tensors

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> Weight:
        info = _find(self.checkpoint, _gguf_name(name), name, shape)
        weight = self._stored(info)
        heads = self._rotary_heads(name)
        return replace(weight, data=_unpermute(weight.data, heads)) if heads else weight

    def _stored(self, info: TensorInfo) -> Weight:
        raw = self.file.bytes(info)
        if info.dtype in _FLOATS:
            element, dtype = _FLOATS[info.dtype]
            return Weight(raw.view(dtype).reshape(info.shape), info.shape, element)
        return Weight(raw.reshape(*info.shape[:-1], -1), info.shape, "f32", info.dtype)

    def _rotary_heads(self, name: str) -> int:
        """Return the number of heads of the weight `name` whose rotary halves are interleaved.

        GGUF interleaves the halves only for q and k, and only in the llama family.
        """
        if self.checkpoint.metadata.get("general.architecture") != "llama":
            return 0
        if ".q_proj." in name:
            return self.architecture.num_heads
        return self.architecture.num_kv_heads if ".k_proj." in name else 0


def _unpermute(data: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return the rows of `heads` heads without the interleaving of their rotary halves.

    Whole rows are moved, so no block format is unpacked.
    """
    half = data.shape[0] // heads // 2
    split = data.reshape(heads, half, 2, *data.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def _gguf_name(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        return f"blk.{match[1]}.{_GGUF_NAMES[match[2]]}.{match[3]}"
    module, _, kind = name.rpartition(".")
    return f"{_GGUF_NAMES[module]}.{kind}" if module in _GGUF_NAMES else name


def _find(checkpoint: Checkpoint, stored: str, requested: str, shape: tuple[int, ...] | None) -> TensorInfo:
    if stored not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.ref} has no tensor {requested}: it is incomplete or not a plain decoder; download it again, "
            "or use another checkpoint."
        )
    info = checkpoint.tensors[stored]
    if shape not in (None, info.shape):
        raise CheckpointError(
            f"{checkpoint.ref} has {requested} of shape {list(info.shape)}, and its configuration says {list(shape)}; "
            "download it again."
        )
    return info
