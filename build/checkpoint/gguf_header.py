"""Parse a GGUF file's header: metadata and tensor table, without weights.

The `gguf` package's own reader takes seconds for a tokenizer of 50,000 entries and does not notice
a truncated file. Block sizes and dequantisation stay with the package. Layout: ggml's gguf.md.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.description import TensorInfo
from llmops.build.checkpoint.file_checks import check_tensor_ranges
from llmops.build.checkpoint.gguf_metadata import check_metadata
from llmops.distribution import missing_extra
from llmops.errors import CheckpointError

#: A row of the tensor table: shape (row-major), GGML type, and offset in bytes from the start of
#: the data.
_TensorRow = tuple[tuple[int, ...], int, int]

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: Maximum number of dimensions of a tensor: ggml's `GGML_MAX_DIMS`.
_MAX_DIMS = 4
#: Metadata lists that a build reads. Other lists are skipped, because a sparse file can claim lists
#: of hundreds of megabytes.
_LISTS_READ = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
#: Maximum number of metadata entries of a file. Published files have fewer than a hundred.
_MAX_PAIRS = 1 << 14
#: Maximum number of tensors of a file. Published decoders have a few thousand.
_MAX_TENSORS = 1 << 16
#: Maximum number of entries of one list. The largest vocabularies have 262,144 tokens and twice as
#: many merges.
_MAX_ENTRIES = 1 << 20
#: Maximum size of one text in bytes. Chat templates have up to 30,000.
_MAX_TEXT = 1 << 22
#: Maximum size in bytes of all texts of a file, read or skipped. The largest vocabularies have
#: 9 MB. Python stores a text with one wide character in four times as many bytes.
_MAX_TEXTS = 1 << 24
#: Maximum size of a header in bytes, with lists that are skipped. The largest vocabularies need 20 MB.
_MAX_HEADER = 1 << 26


@dataclass(frozen=True)
class GgufHeader:
    """The content of a GGUF file's header: metadata, and tensors by name.

    The keys of `metadata` are the file's own (`llama.block_count`, `tokenizer.ggml.tokens`, …).
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(path: Path) -> bool:
    """Return True if the file starts with the GGUF magic number."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: Path) -> GgufHeader:
    """Parse the header of a GGUF file.

    Raises:
        CheckpointError: The file is damaged, truncated or of another GGUF version.
    """
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path} is truncated: {size} bytes are too few for a GGUF header. Download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _GgufReader(path, data).header()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise CheckpointError(f"{path} is truncated or damaged within its header. Download it again.") from error


class _GgufReader:
    """A cursor over the memory-mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0
        self.text_bytes = 0

    def header(self) -> GgufHeader:
        magic, version, tensor_count, pair_count = struct.unpack_from("<4sIQQ", self.data, 0)
        self.position = 24
        if magic != MAGIC:
            raise CheckpointError(
                f"{self.path} is not a GGUF file: it starts with {magic!r}. Give a *.gguf file, or download it again."
            )
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} is GGUF version {version}, and versions 2 and 3 (little-endian) can be read; "
                f"convert the model again."
            )
        self.bound(pair_count, _MAX_PAIRS, "metadata entries")
        self.bound(tensor_count, _MAX_TENSORS, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string()
            if key in metadata:
                raise IndexError(f"{key} occurs twice")
            kind = self.scalar("<I")
            metadata[key] = self.array(key in _LISTS_READ) if kind == _ARRAY else self.value(kind)
        check_metadata(self.path, metadata)
        rows = self.tensor_rows(tensor_count)
        return GgufHeader(metadata, self.place(rows, metadata.get("general.alignment", 32)))

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def bound(self, count: int, limit: int, what: str) -> None:
        """Raise CheckpointError if `count`, the number of `what` in the file, is over `limit`."""
        if count > limit:
            raise CheckpointError(
                f"{self.path} is damaged: it has {count:,} {what}, and at most {limit:,} are read. Download it again."
            )

    def string(self) -> str:
        length = self.scalar("<Q")
        self.bound(length, _MAX_TEXT, "bytes in one text")
        self.text_bytes += length
        self.bound(self.text_bytes, _MAX_TEXTS, "bytes in its texts")
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise IndexError("a text reaches past the end of the file")
        return self.data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise IndexError(f"the value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])

    def array(self, kept: bool) -> list[Any]:
        """Read a list, and return its entries, or an empty list unless `kept`."""
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > len(self.data) - self.position:
            raise IndexError("a list reaches past the end of the file")
        if kind == _ARRAY:
            raise IndexError("a list holds lists, which no model's metadata does")
        if kind in _SCALARS and not kept:
            self.position += count * struct.calcsize(_SCALARS[kind])
            return []
        self.bound(count, _MAX_ENTRIES, "entries in one list")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind][1]}"
            values = list(struct.unpack_from(layout, self.data, self.position))
            self.position += struct.calcsize(layout)
            return values
        values = [self.value(kind) for _ in range(count)]
        return values if kept else []

    def tensor_rows(self, count: int) -> dict[str, _TensorRow]:
        rows: dict[str, _TensorRow] = {}
        for _ in range(count):
            name = self.string()
            if name in rows:
                raise IndexError(f"{name} occurs twice")
            rows[name] = self.tensor_row()
        return rows

    def tensor_row(self) -> _TensorRow:
        dims = self.scalar("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise IndexError(f"a tensor has {dims} dimensions")
        shape = [self.scalar("<Q") for _ in range(dims)]
        return tuple(reversed(shape)), self.scalar("<I"), self.scalar("<Q")

    def place(self, rows: dict[str, _TensorRow], alignment: int) -> dict[str, TensorInfo]:
        self.bound(self.position, _MAX_HEADER, "bytes in its header")
        start = -(-self.position // alignment) * alignment
        tensors = {
            name: self.tensor(name, shape, kind, start + position) for name, (shape, kind, position) in rows.items()
        }
        check_tensor_ranges(self.path, tensors.values(), len(self.data))
        # Padding follows each tensor. In a hole, gigabytes take no disk.
        named = start + sum(-(-tensor.nbytes // alignment) * alignment for tensor in tensors.values())
        if len(self.data) > named:
            raise CheckpointError(
                f"{self.path} is damaged: it has {len(self.data):,} bytes, its header and tensors {named:,}; download "
                "it again."
            )
        return tensors

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        dtype, nbytes = _stored_size(self.path, name, shape, kind)
        return TensorInfo(name, shape, dtype, nbytes, self.path.name, offset)


def _stored_size(path: Path, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise missing_extra("Reading GGUF files needs gguf, which is not installed", "embedded") from error
    try:
        quant = GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(
            f"{path} has the tensor {name} of the unknown GGML type {kind}; a newer gguf package may know it."
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[quant]
    if shape[-1] % block:
        raise CheckpointError(
            f"{path} is damaged: {name} has rows of {shape[-1]}, which blocks of {block} ({quant.name}) do not divide. "
            "Download it again."
        )
    return quant.name, math.prod(shape) // block * block_bytes
