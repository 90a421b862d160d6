"""Numbers that the processes of one machine share: a table in a mapped file, behind a lock that its holder's end frees.

A row is a name's, with five numbers and a time after which nobody misses it: 64 bytes, which a processor fetches at
once. Where it may be follows from its name, so that no row ever moves: a process that is killed in the middle leaves
each of its numbers as it was or as it became.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from hashlib import blake2b
from struct import Struct

# of what is in the file; in its name too, so that gateways of two versions each have their own
VERSION = 2
MAGIC = b"llmops limits %d\n" % VERSION
# a row's name is its digest, which is written last; its group has the rows among which it is looked for
GROUPS, IN_GROUP, DIGEST = 4096, 16, 16
_ROW, _NUMBERS = Struct("=16s6d"), Struct("=6d")
_GROUP = IN_GROUP * _ROW.size
_NOBODY = bytes(DIGEST)
# the first page: magic, the machine's name, how often a process has come, and the processes with when they were seen
_MACHINE, _CHANGES, _PROCESSES = slice(16, 32), Struct("=q"), 64
_AT_CHANGES, _PROCESS, MOST_PROCESSES = slice(32, 40), Struct("=16sd"), 160
_NO_PROCESSES = _PROCESSES + MOST_PROCESSES * _PROCESS.size
_HEADER = 4096
SIZE = _HEADER + GROUPS * _GROUP

# Seconds for which others may hold the lock: a reservation takes some 0.00001, unless its process loses its turn.
PATIENCE, _NAP = 0.05, 0.0001
_TRY = LOCK_EX | LOCK_NB

Found = tuple[bytes, float, float, float, float, float, float]


class Row:
    """A row by its name: where it can be, and where it was seen last."""

    __slots__ = ("at", "digest", "first", "numbers", "place")

    def __init__(self, name: str) -> None:
        self.digest = blake2b(name.encode(), digest_size=DIGEST).digest()
        self.first = _HEADER + int.from_bytes(self.digest[:4], "little") % GROUPS * _GROUP
        self.seen(self.first)

    def seen(self, at: int) -> None:
        self.at, self.numbers = at, at + DIGEST
        # of its digest
        self.place = slice(at, at + DIGEST)


class Table:
    """The table in the file at `path`, of this process alone where there is none. Between `lock` and `unlock` nobody
    else reads or writes.

    Raises OSError where it cannot be made or is another program's file.
    """

    def __init__(self, path: str | None) -> None:
        self._file = -1
        if path is None:
            self.map = mmap.mmap(-1, SIZE)
            self._begin()
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.lock(patience=1.0)
            if not os.fstat(self._file).st_size:
                # written, not left out: memory that is not there when it is needed would end the process
                if os.pwrite(self._file, bytes(SIZE), 0) != SIZE:
                    os.ftruncate(self._file, 0)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            elif os.fstat(self._file).st_size != SIZE:
                raise OSError("it is another program's file")
            self.map = mmap.mmap(self._file, SIZE)
            if self.map[: len(MAGIC)] != MAGIC:
                self._begin()
            self.unlock()
        except BaseException:
            os.close(self._file)
            raise

    def lock(self, patience: float = PATIENCE) -> None:
        """Raises TimeoutError when another process holds it for too long."""
        if self._file < 0:
            return
        until = 0.0
        while True:
            try:
                flock(self._file, _TRY)
                return
            except BlockingIOError:
                until = until or time.monotonic() + patience
                if time.monotonic() > until:
                    raise TimeoutError("another process holds it") from None
                time.sleep(_NAP)

    def unlock(self) -> None:
        if self._file >= 0:
            flock(self._file, LOCK_UN)

    def close(self) -> None:
        """Also gives the lock back."""
        self.map.close()
        if self._file >= 0:
            os.close(self._file)

    # -- rows ------------------------------------------------------------------------------------------------------

    def find(self, row: Row) -> Found | None:
        """Its digest, its five numbers and its time; None where there is no such row."""
        found = _ROW.unpack_from(self.map, row.at)
        if found[0] == row.digest:
            return found
        at = self.map.find(row.digest, row.first, row.first + _GROUP)
        if at < 0:
            return None
        row.seen(at)
        return _ROW.unpack_from(self.map, at)

    def write(self, row: Row, one: float, two: float, three: float, four: float, five: float, until: float) -> None:
        """Its numbers, in this order, and its time: in the row, or in a new one in the place of that which is missed
        least. Named, not as `*numbers`: that took longer than to write them.
        """
        new = self.map[row.place] != row.digest
        if new:
            row.seen(min(range(row.first, row.first + _GROUP, _ROW.size), key=self._until))
            self.map[row.place] = _NOBODY
        _NUMBERS.pack_into(self.map, row.numbers, one, two, three, four, five, until)
        if new:
            self.map[row.place] = row.digest

    def _until(self, at: int) -> float:
        digest, *_, until = _ROW.unpack_from(self.map, at)
        return until if digest != _NOBODY else float("-inf")

    # -- processes -------------------------------------------------------------------------------------------------

    @property
    def machine(self) -> str:
        return self.map[_MACHINE].hex()

    @property
    def changes(self) -> bytes:
        """Other than before: a process has come or gone."""
        return self.map[_AT_CHANGES]

    def processes(self) -> dict[bytes, float]:
        """When each was seen last."""
        found = dict(_PROCESS.iter_unpack(self.map[_PROCESSES:_NO_PROCESSES]))
        found.pop(_NOBODY, None)
        return found

    def see(self, process: bytes, now: float, dead: float) -> None:
        """`process` lives. One that came new gets the place of another that was not seen since `dead`."""
        at = self.map.find(process, _PROCESSES, _NO_PROCESSES)
        if at >= 0:
            _PROCESS.pack_into(self.map, at, process, now)
            return
        for at in range(_PROCESSES, _NO_PROCESSES, _PROCESS.size):
            known, seen = _PROCESS.unpack_from(self.map, at)
            if known == _NOBODY or not dead < seen <= now + 1:
                _PROCESS.pack_into(self.map, at, process, now)
                self._changed()
                return
        raise OSError(f"more than {MOST_PROCESSES} processes share it")

    def leave(self, process: bytes) -> None:
        at = self.map.find(process, _PROCESSES, _NO_PROCESSES)
        if at >= 0:
            _PROCESS.pack_into(self.map, at, _NOBODY, 0.0)
            self._changed()

    def _changed(self) -> None:
        self.map[_AT_CHANGES] = _CHANGES.pack(_CHANGES.unpack(self.changes)[0] + 1)

    def _begin(self) -> None:
        self.map[_MACHINE] = secrets.token_bytes(16)
        self.map[: len(MAGIC)] = MAGIC
