"""The shared-memory segments of a server's Python models, and the lock that protects them.

A process id means nothing in another PID namespace, whose /dev/shm may be the same (`docker run
--ipc=host`). So a locked file lies beside the segments. The server inherits the lock: the kernel
releases it when the last process that could use the segments has ended, however it ended.
(`filelock` does not support inheriting a lock.)
"""

import contextlib
import fcntl
import os
from pathlib import Path

from llmops.errors import ResourceError
from llmops.model_repository.server.command import SHM_PREFIX

SHM_DIR = Path("/dev/shm")
_LOCK = "lock"


class SharedMemory:
    """The segments of one server, whose names start with `prefix`.

    The server inherits the file descriptor `lock`.
    """

    def __init__(self) -> None:
        self.prefix = f"{SHM_PREFIX}{os.getpid()}_{os.urandom(3).hex()}_"
        try:
            self.lock = _create_locked_file(SHM_DIR / f"{self.prefix}{_LOCK}")
        except OSError as error:
            raise ResourceError(
                f"{SHM_DIR} cannot be written ({error.strerror}), but Triton's Python models need it: mount "
                "a tmpfs there, or start the container with `--shm-size=1g`."
            ) from error

    def protect(self) -> None:
        """Make the segments unreadable for other users.

        Triton creates segments readable, whatever the umask. A process that opened a segment
        earlier can still read it, but no prompt is in a segment before the server is ready.
        """
        for segment in SHM_DIR.glob(f"{self.prefix}*"):
            with contextlib.suppress(OSError):
                if segment.lstat().st_mode & 0o077 and segment.lstat().st_uid == os.geteuid():
                    segment.chmod(0o600)

    def remove(self) -> None:
        """Remove the segments after the server has ended. A second call does nothing."""
        remove_segments(self.prefix)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def remove_stale_segments() -> None:
    """Remove this user's segments of servers that have ended without removing them."""
    for path in SHM_DIR.glob(f"{SHM_PREFIX}*_{_LOCK}"):
        # skip a lock that is in use, or whose file another process has removed
        with contextlib.suppress(OSError):
            _remove_unlocked(path)


def remove_segments(prefix: str) -> None:
    """Remove this user's segments whose names start with `prefix`."""
    for segment in SHM_DIR.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if segment.lstat().st_uid == os.geteuid():
                segment.unlink()


def _create_locked_file(path: Path) -> int:
    """Create a locked file.

    The file is renamed to `path` once it is locked, so that it never looks stale.
    """
    scratch = path.with_name(f".{path.name}")
    lock = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    scratch.rename(path)
    return lock


def _remove_unlocked(path: Path) -> None:
    """Remove the segments of a lock file. Raise OSError if another process holds the lock."""
    if path.lstat().st_uid != os.geteuid():
        return
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_segments(path.name.removesuffix(_LOCK))
    finally:
        os.close(lock)
