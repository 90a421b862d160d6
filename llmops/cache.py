"""Where llmops keeps what it can make again."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llmops.errors import ResourceError


def cache_dir() -> Path:
    """`$LLMOPS_CACHE`, or `llmops` in the user's cache folder; it is there, and can be written.

    Where neither can, as in a container with an unknown user: a folder of that user's own among the temporary files.
    Raises ResourceError when that is not possible either.
    """
    for folder in _wanted():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return _private()


def _wanted() -> Iterator[Path]:
    if own := os.environ.get("LLMOPS_CACHE"):
        yield Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        yield Path(base) / "llmops"
    # raises for a user without a home
    with suppress(RuntimeError):
        yield Path.home() / ".cache" / "llmops"


def _private() -> Path:
    """Programs are run from the cache, so it must not be a folder that somebody else laid out there."""
    try:
        folder = Path(tempfile.gettempdir()) / f"llmops-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ResourceError(
            f"The cache folder cannot be used ({error}); set LLMOPS_CACHE to a writable folder."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ResourceError(
            f"{folder} is not yours alone, so nothing is run from it; set LLMOPS_CACHE to a folder of your own."
        )
    return folder
