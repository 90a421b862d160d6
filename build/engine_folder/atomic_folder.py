"""Publish a folder atomically after checking that the disk has room, and create temporary folders."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from llmops.errors import BuildError, InputError, LlmopsError, ResourceError

_SUFFIX, _ASIDE = ".building", ".replaced"
_MARGIN = 64 << 20


def check_space(output: Path, needed: int) -> None:
    """Raises ResourceError when the file system of `output` has not `needed` bytes (plus a margin) free."""
    parent = existing_parent(output)
    free = shutil.disk_usage(parent).free
    if free < needed + _MARGIN:
        raise ResourceError(
            f"the build needs about {_gib(needed + _MARGIN)} in {parent}, where {_gib(free)} are free; "
            "make room or give -o a folder on another disk."
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    parent = path.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    return parent


def resolve_output(output: Path) -> Path:
    """Where a build for `output` writes: a symbolic link stays, and what it points to is made or replaced.

    Raises InputError for symlink loops.
    """
    if not output.is_symlink():
        return output
    with contextlib.suppress(OSError, RuntimeError):
        real = output.resolve()
        if not real.is_symlink():
            return real
    raise InputError(f"{output} is a symbolic link that leads back to itself; remove it or give -o another folder.")


# too large for the disk, for the user's quota, for `ulimit -f`
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# safetensors and torch say it in words only; numpy says how much it wrote
_FULL_TEXT = (
    *(f"os error {number})" for number in _FULL), *(os.strerror(number) for number in _FULL), " requested and ",
)  # fmt: skip


@contextlib.contextmanager
def report_full_disk(output: Path) -> Iterator[None]:
    """A write that found no room, in whatever library, becomes a ResourceError."""
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
    return getattr(error, "errno", None) in _FULL or any(text in str(error) for text in _FULL_TEXT)


class StagingFolder:
    """`with Workplace(output) as folder:` fills a hidden sibling of `output` and moves it there at the end.

    On any exception, Ctrl-C and SIGTERM included, the sibling is removed and `output` stays as it was. One build at a
    time (`sole_build`) works for an `output`, so what a killed one left is known for what it is.
    """

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.folder = _sibling(self.output, _SUFFIX)

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
                f"the engine could not be moved to {self.output} ({error}); give -o another folder."
            ) from error


def _sibling(output: Path, suffix: str) -> Path:
    return output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}{suffix}")


def remove_leftovers(output: Path) -> None:
    """Folders of builds for `output` that were killed; the caller holds its lock.

    An engine that was moved aside is put back when nothing has taken its place.
    """
    for folder in _siblings(output):
        if folder.suffix == _ASIDE and not output.exists():
            os.rename(folder, output)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _siblings(output: Path) -> list[Path]:
    """What `_sibling` named for `output`, and not for an output whose name only begins alike (llama-3, llama-3.1)."""
    ours = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.(building|replaced)")
    return [path for path in output.parent.iterdir() if ours.fullmatch(path.name) and not path.is_symlink()]


def replace_folder(new: Path, place: Path) -> None:
    """Rename `new` to `place`; what was there goes aside first, and comes back if the second rename fails."""
    aside = _sibling(place, _ASIDE)
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
        # while it is being removed it must not look like an engine to put back
        rubbish = aside.with_suffix(_SUFFIX)
        os.rename(aside, rubbish)
        shutil.rmtree(rubbish, ignore_errors=True)


def write_text_atomically(path: Path, text: str) -> None:
    """A file that is the old one or the new one, also after a crash. Raises InputError where it cannot be written."""
    scratch = _sibling(path, _SUFFIX)
    try:
        scratch.write_text(text)
        _sync(scratch)
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written ({error.strerror}); run this as its owner.") from error


def sync_tree(folder: Path) -> None:
    """All files and folders below are on the disk when this returns."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# waits until nobody holds the other end of its input, which the kernel closes even after `kill -9`
_REMOVER = 'cat > /dev/null; rm -rf -- "$1"'


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Removed by a process of its own when this one is gone: `finally` does not run after SIGKILL."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # of its own session, so that neither Ctrl-C nor a signal to the process group reaches it
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
