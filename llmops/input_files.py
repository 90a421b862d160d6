"""Bounded reading of files that a user names, and that may come from strangers.

A file with a hole takes no disk, and as much memory as it says; JSON can be nested so deeply that
its parser gives up.
"""

import errno
import json
import os
from pathlib import Path
from typing import Any

#: Bytes of a configuration file. The largest known, a tokenizer_config.json, has 2 MB.
MAX_CONFIG_BYTES = 8 * 2**20

#: Bytes of tokenizer.json and of the index of weight files. The largest known have 35 MB.
MAX_TABLE_BYTES = 64 * 2**20

#: Bytes of a file of examples, prompts or a trace. Mooncake's longest trace has 20 MB.
MAX_LIST_BYTES = 256 * 2**20

#: Exceptions of reading JSON that has another form than expected: a list where an object was, a
#: number that is too large, lists nested a thousand times.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def leads_outside(path: Path, folder: Path) -> bool:
    """Return True if a file of `folder` is neither in it nor in the blobs of the hub's cache."""
    real = folder.resolve()
    allowed = [real]
    # In the hub's cache, models--OWNER--NAME/snapshots/REVISION/FILE is a link to
    # ../../blobs/DIGEST.
    if real.parent.name == "snapshots":
        allowed.append(real.parents[1] / "blobs")
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # a loop
        return True
    return not any(target.is_relative_to(one) for one in allowed)


def read_bounded(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: The file cannot be read, or has more than `max_bytes`.
    """
    with path.open("rb") as file:
        # a pipe and a device have no size
        size = os.fstat(file.fileno()).st_size
        data = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(data)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MiB")
    return data


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text of at most MAX_LIST_BYTES.

    Raises:
        OSError: The file cannot be read, or is larger.
        UnicodeDecodeError: The file is not UTF-8.
    """
    return read_bounded(path, MAX_LIST_BYTES).decode().splitlines()


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """Return the JSON value in a file.

    Raises:
        OSError: The file cannot be read, or has more than `max_bytes`.
        ValueError: The file does not hold JSON.
    """
    return parse_json(read_bounded(path, max_bytes))


def parse_json(raw: bytes | bytearray | str) -> Any:
    """Parse JSON like `json.loads`, with ValueError as the only exception."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
