"""The cache folder: its location, and a check that no other user can write to it."""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from llmops.errors import InputError, ResourceError


def cache_dir() -> Path:
    """Return `$LLMOPS_CACHE`, or `llmops` in the user's cache folder, and create the folder.

    Without a writable home, as in a container, return a folder of the user below the temporary
    directory.

    Raises:
        InputError: The folder in LLMOPS_CACHE or XDG_CACHE_HOME cannot be used.
        ResourceError: No folder can be used.
    """
    if explicit := os.environ.get("LLMOPS_CACHE"):
        return _explicit_dir(Path(explicit), "LLMOPS_CACHE")
    if base := os.environ.get("XDG_CACHE_HOME"):
        return _explicit_dir(Path(base) / "llmops", "XDG_CACHE_HOME")
    # Path.home and expanduser raise RuntimeError for a user without a home directory.
    with suppress(OSError, RuntimeError):
        folder = Path.home() / ".cache" / "llmops"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return _temporary_dir()


def check_own_folders(folder: Path, top: Path) -> None:
    """Check that only this user, or root, writes `folder` and the folders between it and `top`.

    Folders that do not exist yet pass.

    Raises:
        ResourceError: Another user owns one of the folders or may write it.
    """
    for one in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top) and parent != top)):
        with suppress(FileNotFoundError):
            _check_owner(one)


def cached_store() -> Path:
    """Return the SQLite store in the cache folder, which need not exist.

    Raises:
        ResourceError: Another user owns the store or a file of SQLite beside it, or may write it.
    """
    store = cache_dir() / "store.db"
    for one in store.parent.glob(f"{store.name}*"):
        with suppress(FileNotFoundError):  # SQLite removes its files with the last connection
            if not one.is_symlink() or one.lstat().st_uid != os.getuid():
                _check_owner(one)
    return store


def _check_owner(path: Path) -> None:
    status = path.lstat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
        raise ResourceError(
            f"{path} can be written by another user, so llmops does not use it; remove it, or set LLMOPS_CACHE to a "
            "folder of your own."
        )


def _explicit_dir(folder: Path, variable: str) -> Path:
    """Return the folder that the environment variable `variable` names.

    An unusable folder is an error, because another folder would hide the keys and usage stored in
    the named folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        reason = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
        raise InputError(
            f"The cache folder {folder} that {variable} names cannot be used ({reason}); make it writable, or set "
            f"{variable} to another folder."
        ) from error
    return folder


def _temporary_dir() -> Path:
    """Return a cache folder below the temporary directory.

    Raise ResourceError if another user owns it: programs are run from the cache.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"llmops-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ResourceError(
            f"The cache folder cannot be used ({error}); set LLMOPS_CACHE to a writable folder."
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ResourceError(
            f"{folder} belongs to another user or is open to others, so llmops runs nothing from it; set LLMOPS_CACHE "
            "to a folder of your own."
        )
    return folder
