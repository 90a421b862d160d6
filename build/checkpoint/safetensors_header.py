"""Parse safetensors headers: names, shapes, types and byte ranges. Detect truncated files."""

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from llmops.build.checkpoint.description import TensorInfo
from llmops.build.checkpoint.file_checks import check_tensor_ranges, read_json
from llmops.errors import CheckpointError
from llmops.input_files import MAX_TABLE_BYTES, parse_json

INDEX_NAME = "model.safetensors.index.json"
#: Maximum size of a header in bytes: DeepSeek V3 in one file would have 14 MB. The format allows 100
#: MB, which take 1.5 GB once parsed.
_MAX_HEADER = 2**24
#: Maximum size of all headers of a checkpoint, and maximum number of tensors. Kimi K2 in 4 bits has
#: 209,000 tensors in about 34 MB.
_MAX_HEADERS, _MAX_TENSORS = 5 * 2**23, 2**18
#: Maximum number of weight files. The largest known checkpoint has about 700. Each stays open.
_MAX_FILES = 2**10
#: Maximum number of values in one header. A tensor has six, each followed by a comma.
_MAX_VALUES = 2**20
#: Maximum number of dimensions of a tensor. The product of 100,000 sizes takes minutes.
_MAX_DIMS = 16
#: Maximum bytes of a value of a type that is not in `_BITS`: a complex number of two F64.
_MAX_VALUE = 16
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


def shard_files(folder: Path) -> list[str]:
    """Return the weight files of a Hugging Face folder, or an empty list.

    Like transformers, prefer model.safetensors to the files of an index.
    """
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_shards(folder, index)
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _indexed_shards(folder: Path, index: Path) -> list[str]:
    weight_map = read_json(index, MAX_TABLE_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        raise CheckpointError(f"{index} has no `weight_map` of tensors to file names; download it again.")
    names = sorted(set(weight_map.values()))
    _bound(index, len(names), _MAX_FILES, "weight files")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files that its index names, first {missing[0]}; "
            "download the rest."
        )
    return names


def _is_file_name(value: Any) -> bool:
    """Return True if `value` is a file name without a folder.

    A path with folders could lead out of the checkpoint.
    """
    return (
        isinstance(value, str)
        and value not in ("", ".", "..")
        and not {"/", "\0"} & {*value}
        and len(value.encode()) < 256
    )


def read_headers(folder: Path, shards: Sequence[str]) -> dict[str, TensorInfo]:
    """Return the descriptions of the tensors in the weight files `shards` of a folder.

    Raises:
        CheckpointError: A header is damaged, a file is truncated, two files have the same tensor,
            or the headers are too large together.
    """
    _bound(folder, len(shards), _MAX_FILES, "weight files")
    tensors: dict[str, TensorInfo] = {}
    left = _MAX_HEADERS
    for shard in shards:
        found, left = _read_header(folder / shard, shard, left)
        if twice := found.keys() & tensors.keys():
            name = min(twice)
            raise CheckpointError(f"{folder} has {name} both in {tensors[name].file} and {shard}; download it again.")
        tensors |= found
        _bound(folder, len(tensors), _MAX_TENSORS, "tensors")
    return tensors


def _bound(path: Path, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise CheckpointError(f"{path} has more than {limit:,} {what}; download it again.")


def read_header(path: Path, relative: str) -> dict[str, TensorInfo]:
    """Return the descriptions of the tensors in one file.

    `relative` is the path of the file in the checkpoint.

    Raises:
        CheckpointError: The header is damaged, or the file is truncated.
    """
    return _read_header(path, relative, _MAX_HEADERS)[0]


def _read_header(path: Path, relative: str, most: int) -> tuple[dict[str, TensorInfo], int]:
    """Return the descriptions of the tensors in one file, and the rest of `most` bytes of headers."""
    # The file is opened once, because another file may take its place.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = _header_length(path, file.read(8))
        if length > most:
            raise CheckpointError(
                f"{path.parent} has more than {_MAX_HEADERS:,} bytes in the headers of its weight files; "
                "download it again."
            )
        header = _header(path, file, length, size)
    tensors = {
        name: _tensor(path, relative, name, entry, 8 + length)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    check_tensor_ranges(path, tensors.values(), size)
    # The format allows no other bytes. In a hole, gigabytes take no disk until they are copied.
    named = 8 + length + sum(tensor.nbytes for tensor in tensors.values())
    if named != size:
        raise CheckpointError(
            f"{path} is damaged: it has {size:,} bytes, its header and tensors {named:,}; download it again."
        )
    return tensors, most - length


def _header_length(path: Path, prefix: bytes) -> int:
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= _MAX_HEADER:
        raise CheckpointError(
            f"{path} is not a safetensors file: its first 8 bytes give no header length up to {_MAX_HEADER:,}. "
            "Download it again."
        )
    return length


def _header(path: Path, file: BinaryIO, length: int, size: int) -> dict[str, Any]:
    if 8 + length > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size:,} bytes and its header alone needs {8 + length:,}. Download it again."
        )
    raw = file.read(length)
    _bound(path, raw.count(b","), _MAX_VALUES, "values in its header")
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged safetensors header ({error}); download it again.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged safetensors header (it is not a JSON object); download it again.")
    return header


def _tensor(path: Path, relative: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        begin, end = _counts(entry["data_offsets"])
        shape = tuple(_counts(entry["shape"]))
        dtype = str(entry["dtype"])
        info = TensorInfo(name, shape, dtype, end - begin, relative, data_start + begin)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a damaged header entry for {name} ({error}); download it again.") from error
    bits = _BITS.get(dtype)
    wrong = info.nbytes > info.numel * _MAX_VALUE if bits is None else (info.numel * bits + 7) // 8 != info.nbytes
    if info.nbytes < 0 or wrong:
        raise CheckpointError(
            f"{path}: {name} is {info.shape} {dtype} but has {info.nbytes:,} bytes; the file is damaged, "
            "download it again."
        )
    return info


def _counts(values: Any) -> list[int]:
    """Return `values` as a list of whole numbers. JSON also allows 1.5, 1e999, true and -1.

    Raises:
        ValueError: `values` is not a list of whole numbers, or has more than `_MAX_DIMS` entries.
    """
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{str(values)[:40]} is not a list of whole numbers")
    if len(values) > _MAX_DIMS:
        raise ValueError(f"a list has {len(values):,} numbers, and at most {_MAX_DIMS} are read")
    return values
