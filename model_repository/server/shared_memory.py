"""The shared memory of a server's Python models: what it is called, and when it may be removed.

A process number says nothing in another PID namespace, and /dev/shm may be the same there (`docker run --ipc=host`). So
a locked file lies beside the segments. The server inherits the lock: the kernel releases it when the last process
that could use the segments has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from llmops.errors import ResourceError
from llmops.model_repository.server.command import SHM_PREFIX

SHM_DIR = Path("/dev/shm")
_LOCK = "lock"


class SharedMemory:
    """The segments of one server: their names start with `prefix`. `lock` is a file descriptor for it to inherit."""

    def __init__(self) -> None:
        self.prefix = f"{SHM_PREFIX}{os.getpid()}_{os.urandom(3).hex()}_"
        try:
            self.lock = _locked_file(SHM_DIR / f"{self.prefix}{_LOCK}")
        except OSError as error:
            raise ResourceError(
                f"{SHM_DIR} cannot be written ({error.strerror}), and Triton's Python models need it: "
                "mount a tmpfs there, in a container with `--shm-size=1g`."
            ) from error

    def protect(self) -> None:
        """Take the segments from other users: Triton makes them readable for everybody, whatever the umask.

        A process that opened a segment before keeps it. Prompts pass through only after the server is ready.
        """
        for segment in SHM_DIR.glob(f"{self.prefix}*"):
            with contextlib.suppress(OSError):
                if segment.lstat().st_mode & 0o077 and segment.lstat().st_uid == os.geteuid():
                    segment.chmod(0o600)

    def remove(self) -> None:
        """Call it when the server has ended; a second call does nothing."""
        remove_segments(self.prefix)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def remove_stale_segments() -> None:
    """Remove the segments of servers that are gone (killed machines, kill -9). Other users' are theirs to remove."""
    for path in SHM_DIR.glob(f"{SHM_PREFIX}*_{_LOCK}"):
        # in use, another user's, or removed meanwhile
        with contextlib.suppress(OSError):
            _remove_unlocked(path)


def remove_segments(prefix: str) -> None:
    """Remove our user's segments whose names start with `prefix`."""
    for segment in SHM_DIR.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if segment.lstat().st_uid == os.geteuid():
                segment.unlink()


def _locked_file(path: Path) -> int:
    """It gets its name only once it is locked, so that no sweep sees it before."""
    scratch = path.with_name(f".{path.name}")
    lock = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    scratch.rename(path)
    return lock


def _remove_unlocked(path: Path) -> None:
    """Raises OSError when somebody holds the lock, or the file is not ours."""
    if path.lstat().st_uid != os.geteuid():
        return
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_segments(path.name.removesuffix(_LOCK))
    finally:
        os.close(lock)
