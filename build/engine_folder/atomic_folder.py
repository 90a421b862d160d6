"""Publish a folder atomically, check that the disk has room, and create temporary folders."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from llmops.errors import BuildError, InputError, LlmopsError, ResourceError
from llmops.output_files import hidden_sibling, is_put_by_another

#: Suffix of a folder that a build fills.
STAGING_SUFFIX = ".building"
#: Suffix of an old engine that was moved out of the way.
_ASIDE = ".replaced"
#: Names of files that systems make in the folders of users: macOS, Windows, NFS for open files, and
#: Python, which wrote byte code into repositories of earlier versions.
_SYSTEM_FILE = re.compile(r"\.DS_Store|\._.*|Thumbs\.db|desktop\.ini|\.nfs[0-9a-f]+|.*\.pyc")
#: Bytes that must be free beyond the estimate, for logs and the file system's metadata.
_MARGIN = 64 << 20


def check_space(output: Path, needed: int) -> None:
    """Raise ResourceError if the file system of `output` lacks `needed` bytes plus a margin."""
    parent = existing_parent(output)
    free = shutil.disk_usage(parent).free
    if free < needed + _MARGIN:
        raise ResourceError(
            f"The build needs about {_gib(needed + _MARGIN)} in {parent}, where {_gib(free)} are free; "
            "make room or give -o a folder on another disk."
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def existing_parent(path: Path) -> Path:
    """Return the nearest existing folder above `path`."""
    parent = path.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    return parent


def resolve_output(output: Path) -> Path:
    """Return the folder that a build with `-o output` writes.

    A symbolic link is followed: the link stays, and the folder behind the link is created or
    replaced.

    Raises:
        InputError: The link leads back to itself, or another user put it there.
    """
    if not output.is_symlink():
        return output
    reject_put_by_another(output)
    with contextlib.suppress(OSError, RuntimeError):
        real = output.resolve()
        if not real.is_symlink():
            return real
    raise InputError(f"{output} is a symbolic link that leads back to itself; remove it or give -o another folder.")


def reject_put_by_another(path: Path) -> None:
    """Raise InputError if another user made a file in a folder that all may write to."""
    if is_put_by_another(path):
        raise InputError(
            f"{path} was made by another user in a folder that all may write to; remove it, or give -o another folder."
        )


#: Error numbers of a full disk, an exhausted quota and a file size limit (`ulimit -f`).
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Parts of messages that mean a full disk. safetensors and torch raise errors without a number, and
#: numpy says how many of the requested values it wrote.
_FULL_TEXT = (
    *(f"os error {number})" for number in _FULL), *(os.strerror(number) for number in _FULL), " requested and ",
)  # fmt: skip


@contextlib.contextmanager
def report_full_disk(output: Path) -> Iterator[None]:
    """Convert any "no space left" error inside the block to a ResourceError that names `output`."""
    try:
        yield
    except LlmopsError:
        raise
    except Exception as error:
        if not _no_room(error):
            raise
        raise ResourceError(
            f"{existing_parent(output)} has no room for more (disk, quota or file size limit); nothing half written "
            "was left. Make room and run the same command again."
        ) from error


def _no_room(error: BaseException) -> bool:
    """Return True if an error of any library means that the disk is full."""
    return getattr(error, "errno", None) in _FULL or any(text in str(error) for text in _FULL_TEXT)


class StagingFolder:
    """A hidden folder that replaces `output` when the `with` block ends without an error.

    On any exception, including KeyboardInterrupt and SIGTERM, the hidden folder is removed and
    `output` stays as it was. The caller holds the build lock of `output`, so leftovers belong to
    killed builds.
    """

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.folder = hidden_sibling(self.output, STAGING_SUFFIX)

    def __enter__(self) -> Path:
        self.folder.mkdir(parents=True)
        return self.folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _publish(self) -> None:
        try:
            sync_tree(self.folder)
            replace_folder(self.folder, self.output)
        except OSError as error:
            if _no_room(error):
                raise
            raise BuildError(
                f"The engine could not be moved to {self.output} ({error}); give -o another folder."
            ) from error


def remove_leftovers(output: Path) -> None:
    """Remove the folders that killed builds of `output` left. The caller holds the build lock.

    An old engine that was moved out of the way is moved back if no new engine took its place.
    """
    for folder in _siblings(output):
        if folder.suffix == _ASIDE and not output.exists():
            os.rename(folder, output)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files and links below `folder`, relative to `folder`."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def reject_added_files(folder: Path, added: list[str]) -> None:
    """Raise ResourceError if `added` names files of a user, which would be removed with the folder."""
    if kept := [path for path in added if not _SYSTEM_FILE.fullmatch(path.rpartition("/")[2])]:
        raise ResourceError(
            f"{folder} holds files that llmops did not make and would remove: {', '.join(kept[:5])}. "
            "Move them to another folder."
        )


def _siblings(output: Path) -> list[Path]:
    """Return the staging folders of `output`.

    Folders of another output with a longer name (llama-3.1 beside llama-3), and those that another
    user put there, are not among them.
    """
    ours = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.(building|replaced)")
    found = (path for path in output.parent.iterdir() if ours.fullmatch(path.name) and not path.is_symlink())
    return [path for path in found if not is_put_by_another(path)]


def replace_folder(new: Path, place: Path) -> None:
    """Rename `new` to `place`, keeping the old folder until the rename has succeeded."""
    aside = hidden_sibling(place, _ASIDE)
    occupied = place.exists()
    if occupied:
        os.rename(place, aside)
    try:
        os.rename(new, place)
    except OSError:
        if occupied:
            os.rename(aside, place)
        raise
    _sync(place.parent)
    if occupied:
        # Rename before removing: `remove_leftovers` must not put back an engine that is half
        # removed.
        discarded = aside.with_suffix(STAGING_SUFFIX)
        os.rename(aside, discarded)
        shutil.rmtree(discarded, ignore_errors=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace the text of a file atomically: a crash leaves either the old or the new text.

    Raises:
        InputError: The file cannot be written.
    """
    scratch = hidden_sibling(path, STAGING_SUFFIX)
    try:
        scratch.write_text(text)
        _sync(scratch)
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise InputError(
            f"{path} cannot be written ({error.strerror}); make it writable, or run this as its owner."
        ) from error


def sync_tree(folder: Path) -> None:
    """Flush all files and folders below `folder` to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


#: Shell program that removes a folder when its standard input closes. The kernel closes the other
#: end of the pipe even after `kill -9`.
_REMOVER = 'cat > /dev/null; rm -rf -- "$1"'


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder that is removed when the block ends.

    The folder is also removed after SIGKILL of this process. `finally` does not run after SIGKILL,
    so a second process removes the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # A new session keeps Ctrl-C and signals to the process group away from the remover.
    remover = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVER, "sh", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield folder
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()
