"""Bounded reading of files that a user names and that may come from untrusted sources.

A sparse file takes no disk, but needs memory for its full length when it is read. Deeply nested
JSON raises RecursionError in the parser.
"""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from llmops.untrusted_text import json_texts

#: Maximum size of a configuration file in bytes. The largest known, a tokenizer_config.json, has 2
#: MB.
MAX_CONFIG_BYTES = 8 * 2**20

#: Maximum size in bytes of tokenizer.json and of the index of weight files. The largest known have
#: 35 MB.
MAX_TABLE_BYTES = 64 * 2**20

#: Maximum size in bytes of a file of examples, prompts or a trace. The longest trace of Mooncake
#: has 20 MB.
MAX_LIST_BYTES = 256 * 2**20

#: Maximum depth of lists and objects in JSON. Known files have up to 12 levels. Where a file is
#: written again with indentation, each bracket of deeper levels would become a line of spaces.
MAX_JSON_DEPTH = 64
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")

#: Exceptions that code raises when it reads JSON of an unexpected form, such as a list in place of
#: an object, a number that is too large, or lists nested a thousand times.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def leads_outside(path: Path, folder: Path) -> bool:
    """Return True if a path in `folder` resolves to a file outside of it.

    Files in the blobs folder of the Hugging Face cache count as inside.
    """
    try:
        return lies_outside(path.resolve(), folder.resolve())
    except (OSError, RuntimeError):  # The links form a loop.
        return True


def lies_outside(target: Path, real: Path) -> bool:
    """Return what `leads_outside` does, for paths that have no links."""
    allowed = [real]
    # In the hub's cache, models--OWNER--NAME/snapshots/REVISION/FILE is a link to
    # ../../blobs/DIGEST.
    if real.parent.name == "snapshots":
        allowed.append(real.parents[1] / "blobs")
    return not any(target.is_relative_to(one) for one in allowed)


def read_bounded(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: The file cannot be read, or has more than `max_bytes` bytes.
    """
    with path.open("rb") as file:
        return read_opened(file, max_bytes)


def read_opened(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the content of an open file. Raises the same errors as `read_bounded`."""
    # The size of a pipe or device is 0, so the bytes that were read are counted too.
    size = os.fstat(file.fileno()).st_size
    data = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(data)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MiB")
    return data


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file of at most MAX_LIST_BYTES.

    Raises:
        OSError: The file cannot be read, or is too large.
        UnicodeDecodeError: The file is not UTF-8.
    """
    return read_bounded(path, MAX_LIST_BYTES).decode().splitlines()


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """Return the JSON value in a file.

    Raises:
        OSError: The file cannot be read, or has more than `max_bytes` bytes.
        ValueError: The file does not contain valid JSON.
    """
    return parse_json(read_bounded(path, max_bytes))


def parse_json(raw: bytes | bytearray | str, *, surrogates: bool = False) -> Any:
    """Parse JSON like `json.loads`, but raise ValueError for every kind of invalid input.

    JSON of more than `MAX_JSON_DEPTH` levels is invalid. Without `surrogates`, so are texts with
    half of a surrogate pair, which cannot be written to a file.
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level: list[dict[str, Any] | list[Any]] = [[value]]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    if level:
        raise ValueError("it is nested too deeply")
    if not surrogates and _SURROGATE_ESCAPE.search(text) and any(map(_SURROGATE.search, json_texts(value, names=True))):
        raise ValueError("a text in it has half of a surrogate pair")
    return value
