"""Output files of commands: a check before the work begins, and atomic writing."""

import errno
import os
import stat
import uuid
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


def _unwritable_error(path: Path, error: OSError) -> InputError:
    """Return the error for an output file that cannot be written, with advice for the user."""
    advice = _ADVICE.get(error.errno or 0, "name a file in a folder that you may write to")
    return InputError(f"{path} cannot be written ({error.strerror or error}); {advice}.")


def check_writable(path: Path) -> None:
    """Check that `path` can be written, so that a long run does not fail at its end.

    Raises:
        InputError: `path` is a folder, or the file cannot be created or written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if _is_special(path):
            check_not_put_by_another(path)
        else:
            partial = hidden_sibling(path, ".part")
            partial.touch(exist_ok=False)
            partial.unlink()
    except OSError as error:
        raise _unwritable_error(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, so that a reader never sees an incomplete file.

    Pipes and devices are written directly.

    Raises:
        InputError: The file cannot be written.
    """
    partial = hidden_sibling(path, ".part")
    try:
        if _is_special(path):
            check_not_put_by_another(path)
            path.write_text(text, "utf-8")
            return
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise _unwritable_error(path, error) from error


def hidden_sibling(path: Path, suffix: str) -> Path:
    """Return a hidden path beside `path`, random so that other users cannot put a link there."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{suffix}")


def is_put_by_another(path: Path, modes: int = stat.S_ISVTX) -> bool:
    """Return True if a path in a sticky folder belongs neither to this user, root, nor the folder's owner.

    Linux refuses to create such files, and to follow such links, with `fs.protected_regular` and
    `fs.protected_symlinks`. In other folders, which a container may mount, the owner is of no
    importance. `modes` has the mode bits of which such a folder has at least one.
    """
    with suppress(FileNotFoundError):
        folder = path.parent.stat()
        return bool(folder.st_mode & modes) and path.lstat().st_uid not in {0, os.getuid(), folder.st_uid}
    return False


def check_not_put_by_another(path: Path) -> None:
    """Check a path that a server keeps in use, the folders above it, and where its links lead.

    Raises:
        PermissionError: Another user made one of them in a folder that all may write to.
    """
    for one in (path.absolute(), Path(os.path.realpath(path))):
        for part in (one, *one.parents):
            if is_put_by_another(part, stat.S_ISVTX | stat.S_IWOTH):
                reason = f"{part} was made by another user in a folder that all may write to"
                raise PermissionError(errno.EACCES, reason)


def _is_special(path: Path) -> bool:
    """Return True for an existing path that is no regular file, such as /dev/stdout.

    A rename would replace the device.
    """
    return path.exists() and not path.is_file()
