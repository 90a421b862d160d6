"""The folders of journals: one for each worker at a time, and what a dead one left is anybody's to take up.

Who works in a folder holds a lock on a file of it, which the system gives back however a process ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK, _DAMAGED = "gw-", "lock", "damaged-"


class FolderLock:
    """A folder that nobody else works in until this is given back."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock

    def give_back(self) -> None:
        os.close(self._lock)

    def remove(self) -> None:
        """The folder with all that is in it."""
        gone = self.folder.with_name(f".{self.folder.name}")
        # at once: nobody may take up half of it
        self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        self.give_back()
        with suppress(OSError):
            gone.parent.rmdir()

    def quarantine(self) -> Path:
        """Rename the folder so that no gateway takes it up, and return its new path. Nothing in it is lost."""
        kept = self.folder.with_name(f"{_DAMAGED}{self.folder.name}")
        self.folder.rename(kept)
        self.give_back()
        return kept


def keep_damaged(file: Path) -> Path:
    """Copy a damaged file beside the folder that it is in, where it outlives the folder, and return the copy's path."""
    kept = file.parent.with_name(f"{_DAMAGED}{file.parent.name}-{file.name}-{secrets.token_hex(4)}")
    shutil.copy(file, kept)
    return kept


def claim(root: Path) -> FolderLock:
    """Return a new folder. Raises OSError when there can be none."""
    while True:
        # each time: who goes may have removed it
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = root / (_PREFIX + secrets.token_hex(6))
        with suppress(FileNotFoundError):
            folder.mkdir(mode=0o700)
            # another may have taken it up as one that was left
            made = _lock_folder(folder)
            if made is not None:
                return made


def lock_abandoned_folders(root: Path) -> Iterator[FolderLock]:
    """Each folder under `root` in which nobody works."""
    for folder in sorted(root.glob(f"{_PREFIX}*")):
        with suppress(FileNotFoundError):
            found = _lock_folder(folder)
            if found is not None:
                yield found


def _lock_folder(folder: Path) -> FolderLock | None:
    path = folder / _LOCK
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # who had it may have removed the folder meanwhile
        if os.fstat(lock).st_ino == path.stat().st_ino:
            return FolderLock(folder, lock)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None
