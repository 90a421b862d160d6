"""Files that commands write: checked before the work begins, and written whole or not at all."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from llmops.errors import InputError

_ADVICE = {
    errno.ENOENT: "create the folder first, or name a file in one that exists",
    errno.ENOTDIR: "name a file in a folder that exists",
    errno.EISDIR: "name a file in it",
    errno.ENOSPC: "free some space, or name a file on another disk",
    errno.EDQUOT: "free some space, or name a file on another disk",
}


def unwritable_error(path: Path, error: OSError) -> InputError:
    """Return the error for a file that cannot be written."""
    advice = _ADVICE.get(error.errno or 0, "name a file in a folder that you may write to")
    return InputError(f"{path} cannot be written ({error.strerror or error}); {advice}.")


def check_writable(path: Path) -> None:
    """Check that `path` can be written, so that a long run does not end with the news that it cannot.

    Raises:
        InputError: `path` is a folder, or a file cannot be created there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if not _is_special(path):
            part = _part(path)
            part.touch()
            part.unlink()
    except OSError as error:
        raise unwritable_error(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader never sees half of it. Pipes and devices are written directly.

    Raises:
        InputError: The file cannot be written.
    """
    part = _part(path)
    try:
        if _is_special(path):
            path.write_text(text, "utf-8")
            return
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise unwritable_error(path, error) from error


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _is_special(path: Path) -> bool:
    """Return True for what must not be replaced by a file, such as /dev/stdout."""
    return path.exists() and not path.is_file()
