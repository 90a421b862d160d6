"""A folder that appears whole or not at all, and the space it needs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from llmops.errors import BuildError, ResourceError

_PREFIX, _SUFFIX, _ASIDE = ".", ".building", ".replaced"
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


class Workplace:
    """`with Workplace(output) as folder:` fills a hidden sibling of `output` and moves it there at the end.

    On any exception, Ctrl-C and SIGTERM included, the sibling is removed and `output` stays as it was. A sibling left
    by a process that was killed is found by its lock, which nobody holds any more, and removed by the next build.
    """

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.folder = self.output.with_name(f"{_PREFIX}{self.output.name}.{uuid.uuid4().hex[:8]}{_SUFFIX}")
        self.lock: int | None = None
        self.previous_handler: Any = None

    def __enter__(self) -> Path:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir()
        self.lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._catch_sigterm()
        return self.folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            self._clean_up()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"the disk of {self.output.parent} is full; nothing was left behind.") from error

    def _publish(self) -> None:
        try:
            sync_tree(self.folder)
            with _locked(self.output.parent):
                replace_folder(self.folder, self.output)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ResourceError(f"the disk of {self.output.parent} is full; nothing was left behind.") from error
            raise BuildError(f"the engine could not be moved to {self.output}: {error}.") from error

    def _clean_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)
        if self.previous_handler is not None:
            signal.signal(signal.SIGTERM, self.previous_handler)

    def _catch_sigterm(self) -> None:
        """SIGTERM would end Python without unwinding; a handler that is already there is somebody else's choice."""
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.previous_handler = signal.signal(signal.SIGTERM, _raise_exit)


def _raise_exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Two builds for the same place finish one after the other. Raises OSError when `wait` is off and it is taken."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def remove_leftovers(output: Path) -> None:
    """Folders of builds for `output` that were killed. A build that still runs holds its lock and is left alone.

    An engine that was moved aside is put back when nothing has taken its place.
    """
    found = [f for f in output.parent.glob(f"{_PREFIX}{output.name}.*") if f.suffix in (_SUFFIX, _ASIDE)]
    if not found:
        return
    with _locked(output.parent):
        for folder in found:
            with contextlib.suppress(OSError), _locked(folder, wait=False):
                if folder.suffix == _ASIDE and not output.exists():
                    os.rename(folder, output)
                else:
                    shutil.rmtree(folder, ignore_errors=True)


def replace_folder(new: Path, place: Path) -> None:
    """Rename `new` to `place`; what was there goes aside first, and comes back if the second rename fails."""
    aside = place.with_name(f"{_PREFIX}{place.name}.{uuid.uuid4().hex[:8]}{_ASIDE}")
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
    shutil.rmtree(aside, ignore_errors=True)


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
