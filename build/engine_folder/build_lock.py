"""One build at a time for one output: a second one waits and then finds the first one's engine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from llmops.build.engine_folder.manifest import FILE_NAME
from llmops.errors import InputError

# a link, a directory, a socket, a pipe without a reader
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
_PID_BYTES = 20


@contextlib.contextmanager
def exclusive_build(output: Path, say: Callable[[str], None], inside: bool = False) -> Iterator[None]:
    """Holds `.NAME.lock` beside `output`, or `inside` it where that is all of a disk that can be written (a container's
    mount). The file goes when the build ends; one that is killed leaves it there, locked by nobody. SIGTERM ends the
    build as Ctrl-C does. Raises InputError where the folder cannot be written."""
    output = output.absolute()
    name = f".{output.name}.lock"
    path = output / name if inside else output.with_name(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(path, lambda: say(f"another build for {output} is under way{_by(path)}; waiting for it."))
    except OSError as error:
        way = "make it writable, or run this as its owner" if inside else "give -o another folder"
        raise InputError(f"{path.parent} cannot be written ({error.strerror}); {way}.") from error
    previous = _raise_on_sigterm()
    try:
        with contextlib.suppress(OSError):  # a full disk has no room for a courtesy
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        if _is_at(handle, path):
            path.unlink()
        os.close(handle)
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def exclusive_replacement(output: Path, say: Callable[[str], None]) -> Iterator[None]:
    """`exclusive_build` for what puts another folder in the place of `output`: it also keeps a `--resume` away, which locks
    inside the folder."""
    with contextlib.ExitStack() as held:
        held.enter_context(exclusive_build(output, say))
        if (output / FILE_NAME).is_file() and os.access(output, os.W_OK):
            held.enter_context(exclusive_build(output, say, inside=True))
        yield


def _raise_on_sigterm() -> signal.Handlers | None:
    """SIGTERM would end Python without unwinding; a handler that is already there is somebody else's choice."""
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None
    signal.signal(signal.SIGTERM, _raise_exit)
    return signal.SIG_DFL


def _raise_exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _locked(path: Path, on_wait: Callable[[], None]) -> int:
    """The open and locked file. One that was unlinked while we waited for it locks nobody out: again."""
    told = False
    while True:
        handle = _opened(path)
        try:
            if not _try_lock(handle):
                if not told:
                    on_wait()
                    told = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _opened(path: Path) -> int:
    """The lock file, made if need be. A link, or a file that holds anything but a process id, is somebody else's and
    would be lost if it were written to: InputError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _not_ours(path) from error
        raise
    if _is_lock_file(handle):
        return handle
    os.close(handle)
    raise _not_ours(path)


def _is_lock_file(handle: int) -> bool:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _PID_BYTES:
        return False
    content = os.pread(handle, _PID_BYTES, 0)
    return not content or content.isdigit()


def _not_ours(path: Path) -> InputError:
    return InputError(f"{path} is not a lock file that llmops wrote; move it away, or give -o another name.")


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _by(path: Path) -> str:
    try:
        return f" (process {int(path.read_text())})"
    except (OSError, ValueError):
        return ""
