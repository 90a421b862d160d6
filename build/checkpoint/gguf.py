"""Reads a GGUF file's header: metadata and tensor table, without its weights.

The `gguf` package's own reader takes seconds for a tokenizer of 50,000 entries and does not notice a file that was
cut off, so the header is read here; block sizes and dequantisation stay with the package. Layout: ggml's gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.base import TensorInfo
from llmops.errors import CheckpointError, MissingDependencyError

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """`metadata` as in the file (`llama.block_count`, `tokenizer.ggml.tokens`, …)."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError when the file is damaged, cut off or of another GGUF version."""
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path} is truncated: {size} bytes are too few for a GGUF header. Download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(path, data).header()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise CheckpointError(f"{path} is truncated or damaged within its header. Download it again.") from error


class _Reader:
    """A cursor over the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def header(self) -> GgufHeader:
        magic, version, tensor_count, pair_count = struct.unpack_from("<4sIQQ", self.data, 0)
        self.at = 24
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {magic!r}.")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read."
            )
        metadata = {}
        for _ in range(pair_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        rows = [self.tensor_row() for _ in range(tensor_count)]
        return GgufHeader(metadata, self.place(rows, int(metadata.get("general.alignment", 32))))

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise IndexError("string reaches past the end of the file")
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise IndexError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > len(self.data):
            raise IndexError("array reaches past the end of the file")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind][1]}"
            values = list(struct.unpack_from(layout, self.data, self.at))
            self.at += struct.calcsize(layout)
            return values
        return [self.value(kind) for _ in range(count)]

    def tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = [self.scalar("<Q") for _ in range(self.scalar("<I"))]
        return name, tuple(reversed(dims)), self.scalar("<I"), self.scalar("<Q")

    def place(self, rows: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, TensorInfo]:
        start = -(-self.at // alignment) * alignment
        tensors = {name: self.tensor(name, shape, kind, start + offset) for name, shape, kind, offset in rows}
        end = max((t.offset + t.nbytes for t in tensors.values()), default=start)
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated: it has {len(self.data):,} bytes, its tensors need {end:,}; "
                "download it again."
            )
        return tensors

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        dtype, nbytes = _stored_size(self.path, name, shape, kind)
        return TensorInfo(name, shape, dtype, nbytes, self.path.name, offset)


def _stored_size(path: Path, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise MissingDependencyError(
            "Reading GGUF files needs the gguf package: pip install 'llmops[embedded]'."
        ) from error
    try:
        quant = GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {name} has the unknown GGML type {kind}; a newer gguf package may know it."
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[quant]
    numel = 1
    for dim in shape:
        numel *= dim
    return quant.name, numel // block * block_bytes
