"""The folders of outboxes: each gateway process creates a new folder.

A folder that a dead process left can be taken over.

The process that works in a folder holds a lock on a file in the folder. The operating system
releases the lock however the process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from llmops.output_files import check_not_put_by_another

log = logging.getLogger(__name__)

_PREFIX, _LOCK, _DAMAGED = "gw-", "lock", "damaged-"
#: Maximum size of the copy of a damaged file, in bytes: the maximum of an intact file. A damaged
#: file may be a sparse file of a terabyte.
_KEPT_BYTES = 64 * 2**20


class FolderLock:
    """A locked folder, in which no other process works until the lock is released."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock: int | None = lock

    @property
    def size(self) -> int:
        """Return the disk space of the files in the folder, in bytes."""
        return sum(file.lstat().st_blocks * 512 for file in self.folder.iterdir())

    def release(self) -> None:
        """Release the lock, so that another process can take over the folder. May be repeated."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def remove(self) -> None:
        """Delete the folder with its files."""
        hidden = self.folder.with_name(f".{self.folder.name}")
        # Rename the folder first, so that no process takes over a half-deleted folder.
        self.folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
        self.release()
        with suppress(OSError):
            hidden.parent.rmdir()

    def quarantine(self) -> Path:
        """Rename the folder so that no process takes it over, and return its new path.

        All files stay in the folder.
        """
        kept = self.folder.with_name(f"{_DAMAGED}{self.folder.name}")
        self.folder.rename(kept)
        self.release()
        return kept


def keep_damaged(file: Path) -> Path:
    """Copy a damaged file to a place beside its folder, and return the path of the copy.

    The copy outlives the folder, and is cut to `_KEPT_BYTES`.
    """
    kept = _kept_path(file)
    kept.touch(mode=0o600)
    with file.open("rb") as damaged:
        kept.write_bytes(damaged.read(_KEPT_BYTES))
    return kept


def set_aside_special_files(folder: Path, names: Iterable[str]) -> None:
    """Move pipes, folders, links and devices with these names from `folder` to a place beside it.

    SQLite opens any file with the name of its log: with a pipe, SQLite would wait forever, and
    other kinds would make it fail to read an intact database.

    Raises:
        OSError: A file cannot be moved.
    """
    for file in (folder / name for name in names):
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(file.lstat().st_mode):
                file.rename(kept := _kept_path(file))
                log.error("%s is not a regular file; it was moved to %s.", file, kept)


def _kept_path(file: Path) -> Path:
    return file.parent.with_name(f"{_DAMAGED}{file.parent.name}-{file.name}-{secrets.token_hex(4)}")


def new_gateway_id() -> str:
    """Return a new, globally unique name for a gateway process."""
    return _PREFIX + secrets.token_hex(6)


def lock_new_folder(root: Path) -> FolderLock:
    """Create a new folder under `root` and return its lock.

    Raises:
        OSError: The folder cannot be created.
    """
    while True:
        # Create the root in every attempt: a process that ends may have removed the empty root.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_not_put_by_another(root)
        folder = root / new_gateway_id()
        with suppress(FileNotFoundError):
            folder.mkdir(mode=0o700)
            # None means that another process took the new folder for an abandoned one and locked
            # it.
            if (lock := _lock_folder(folder)) is not None:
                return lock


def lock_abandoned_folders(root: Path) -> Iterator[FolderLock]:
    """Lock and yield each folder in `root` that no process works in.

    A folder that cannot be locked is reported, and does not delay the delivery of other folders.
    """
    for folder in sorted(root.glob(f"{_PREFIX}*")):
        try:
            lock = _lock_folder(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.error("%s is not an outbox that can be opened (%s); move it to another place.", folder, error.strerror)
            continue
        if lock is not None:
            yield lock


def count_other_folders(root: Path) -> int:
    """Return the number of gateways' folders beside `root`, which belong to other stores."""
    return sum(folder.parent != root for folder in root.parent.glob(f"*/{_PREFIX}*"))


def _lock_folder(folder: Path) -> FolderLock | None:
    for file in (folder, *folder.iterdir()):
        check_not_put_by_another(file)
    path = folder / _LOCK
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have removed the folder in the meantime.
        if os.fstat(lock).st_ino == path.stat().st_ino:
            return FolderLock(folder, lock)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None
