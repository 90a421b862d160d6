"""The folder that a gateway's workers share: their sockets and the stored responses. It goes with the last of them.

Everybody in it holds a lock on one of its files, which the system gives back however a process ends. So a folder
without such a lock belongs to nobody: the next gateway removes it, if the workers could not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmops.errors import ResourceError

_PREFIX, _LOCK = "llmops-gateway-", "lock"
# sockaddr_un has room for so many bytes of a path
_LONGEST_SOCKET = 107
_LONGEST_NAME = "x" * 8 + "/255.sock"


class Workplace:
    """A folder with the lock that this process holds on it."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock

    def enter(self) -> None:
        """In a worker: a lock of its own instead of the one that came with the fork."""
        os.close(self._lock)
        self._lock = _shared(self.folder / _LOCK)

    def leave(self) -> None:
        """Give the lock back; who is the last one removes the folder."""
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def workplace() -> Iterator[Workplace]:
    """A fresh folder with a path that is short enough for sockets. Raises ResourceError when no place has room for one.

    On leaving, the folder is gone.
    """
    for base in _bases():
        _sweep(base)
        folder = _made(base)
        if folder is not None:
            break
    else:
        raise ResourceError(
            "The gateway's workers need a folder for their sockets: no temporary folder can be written, or their paths "
            "are too long; set TMPDIR to one of at most 70 characters."
        )
    new = folder / f"{_LOCK}.new"
    new.touch(mode=0o600)
    lock = _shared(new)
    # only now can others see that there is a lock, and that it is held
    new.rename(folder / _LOCK)
    try:
        yield Workplace(folder, lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _bases() -> Iterator[Path]:
    with suppress(OSError):
        yield Path(tempfile.gettempdir())
    for other in (os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/dev/shm"):
        if other:
            yield Path(other)


def _made(base: Path) -> Path | None:
    if len(os.fsencode(base / (_PREFIX + _LONGEST_NAME))) > _LONGEST_SOCKET:
        return None
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError:
        return None


def _sweep(base: Path) -> None:
    """Remove what gateways of this user left that were killed with all of their workers."""
    folders: list[Path] = []
    with suppress(OSError):
        folders = list(base.glob(_PREFIX + "*"))
    for folder in folders:
        # another gateway may have removed it meanwhile
        with suppress(OSError):
            _remove_if_unused(folder)


def _remove_if_unused(folder: Path) -> None:
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _shared(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock
