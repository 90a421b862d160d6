"""Checks that no file of a SQLite store is older than the others, which SQLite does not notice.

Each usage transaction writes its number to the database (`user_version`), and then to a file beside
it. An older log leaves a lower number in the database than in this file. An older database has a
lower number than the one before the first transaction of its log.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from struct import Struct

#: The number, and the same number with all bits inverted, which shows that a file is damaged.
_CONTENT = Struct("=qq")
#: Sizes in SQLite's file format: the log's header, a frame's header, and the start of a page that
#: has `user_version` at `_VERSION`.
_LOG_HEADER, _FRAME_HEADER, _PAGE_START, _VERSION = 32, 24, 64, slice(60, 64)
#: Maximum number of the log's frames in which the first page of the database is searched.
_MAX_FRAMES = 1000
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read_mark(store: Path) -> int:
    """Return the number of the last usage transaction; 0 if it is unknown."""
    with suppress(OSError):
        file = os.open(_path(store), os.O_RDONLY | _FLAGS)
        try:
            content = os.read(file, _CONTENT.size)
        finally:
            os.close(file)
        if len(content) == _CONTENT.size:
            number, inverted = _CONTENT.unpack(content)
            return number if number == ~inverted else 0
    return 0


def write_mark(store: Path, number: int) -> None:
    """Write the number after its transaction. The store works without the file."""
    with suppress(OSError):
        file = os.open(_path(store), os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            os.write(file, _CONTENT.pack(number, ~number))
        finally:
            os.close(file)


def is_older_than_log(store: Path, log: Path) -> bool:
    """Return True if the database lacks transactions that were in it before its log began."""
    with suppress(OSError, sqlite3.Error), log.open("rb") as frames:
        header = frames.read(_LOG_HEADER)
        for _ in range(_MAX_FRAMES):
            frame, page = frames.read(_FRAME_HEADER), frames.read(_PAGE_START)
            # Frames of the log have its salt; others are left from an earlier log.
            if len(page) < _PAGE_START or frame[8:16] != header[16:24]:
                break
            if int.from_bytes(frame[:4]) == 1:
                # Only SQLite may open the database: closing it would release the locks of all its
                # connections in this process. An immutable database is read without its log.
                with closing(sqlite3.connect(f"{store.absolute().as_uri()}?immutable=1", uri=True)) as database:
                    (known,) = database.execute("PRAGMA user_version").fetchone()
                return bool(known < int.from_bytes(page[_VERSION]) - 1)
            frames.seek(int.from_bytes(header[8:12]) - _PAGE_START, os.SEEK_CUR)
    return False


def _path(store: Path) -> Path:
    return Path(f"{store}.ledger")
