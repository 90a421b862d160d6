"""Lock an output folder, so that one build at a time writes it.

A second build waits, and then finds the engine of the first build.
"""

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

from llmops.build.engine_folder.atomic_folder import reject_put_by_another
from llmops.build.engine_folder.manifest import FILE_NAME
from llmops.errors import InputError

#: Error numbers of `open` for a link, a directory, a socket and a pipe without a reader.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
#: Maximum size of a lock file in bytes: the digits of a process id.
_PID_BYTES = 20


@contextlib.contextmanager
def exclusive_build(output: Path, say: Callable[[str], None], inside: bool = False) -> Iterator[None]:
    """Hold the build lock of `output` inside the block.

    The lock is the file `.NAME.lock`, which is removed at the end. A killed build leaves the file
    behind, unlocked. SIGTERM unwinds the block as Ctrl-C does.

    Args:
        output: The engine folder.
        say: Receives a sentence if another build holds the lock.
        inside: Put the lock inside `output` instead of beside it, because in a container only the
            mounted folder is writable.

    Raises:
        InputError: The folder cannot be written, or the lock's name belongs to an unrelated file
            or to another user's.
    """
    output = output.absolute()
    name = f".{output.name}.lock"
    path = output / name if inside else output.with_name(name)
    reject_put_by_another(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(path, lambda: say(f"another build for {output} is under way{_by(path)}; waiting for it."))
    except OSError as error:
        if isinstance(error, PermissionError) and path.exists():
            raise InputError(
                f"{path} is the lock of another user's build; wait for its end, or remove the file if no build runs."
            ) from error
        way = "make it writable, or run this as its owner" if inside else "give -o another folder"
        raise InputError(f"{path.parent} cannot be written ({error.strerror}); {way}.") from error
    previous = _raise_on_sigterm()
    try:
        # Other builds only report the process id, so a full disk must not end this build.
        with contextlib.suppress(OSError):
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
    """Hold the locks that replacing the folder `output` needs.

    The second lock is inside the folder, where `--resume` takes it.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(exclusive_build(output, say))
        if (output / FILE_NAME).is_file() and os.access(output, os.W_OK):
            held.enter_context(exclusive_build(output, say, inside=True))
        yield


def _raise_on_sigterm() -> signal.Handlers | None:
    """Raise SystemExit on SIGTERM, so that `finally` blocks run, and return the previous handler.

    Return None if nothing was changed: a handler that the application installed stays, and only the
    main thread can set a handler.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None
    signal.signal(signal.SIGTERM, _raise_exit)
    return signal.SIG_DFL


def _raise_exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _locked(path: Path, on_wait: Callable[[], None]) -> int:
    """Return the open, locked file.

    If another build unlinked the file during the wait, open and lock the new file: a lock on an
    unlinked file excludes no other build.
    """
    noted = False
    while True:
        handle = _opened(path)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not noted:
                    on_wait()
                    noted = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _opened(path: Path) -> int:
    """Open the lock file, creating it if needed.

    Raises:
        InputError: The path is a link, or a file that holds anything but a process id. Writing
            there would destroy a file of another program.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
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
