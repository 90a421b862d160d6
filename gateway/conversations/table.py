"""The stored responses in SQLite: one file that all workers of a gateway share, or memory where there is only one.

Bounded in number, bytes and age; what was used last is kept longest. Nothing here outlives the gateway.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

_BUSY_SECONDS = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS responses(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, worker TEXT,
    stored REAL NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON responses(used, size);
CREATE INDEX IF NOT EXISTS by_age ON responses(stored);
CREATE TABLE IF NOT EXISTS items(
    owner TEXT NOT NULL, id TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses(id) ON DELETE CASCADE,
    PRIMARY KEY(owner, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_response ON items(response);
"""
_CHAIN = """
WITH RECURSIVE chain(id, previous, place) AS (
    SELECT id, previous, 0 FROM responses WHERE id = :id AND owner = :owner AND stored >= :since
    UNION ALL SELECT one.id, one.previous, place + 1 FROM responses AS one JOIN chain ON one.id = chain.previous
    WHERE one.owner = :owner AND one.stored >= :since AND place < :most)
SELECT id, previous FROM chain ORDER BY place
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Maximum number of responses, bytes of JSON, and age in seconds."""

    entries: int = 2_000
    size: int = 64_000_000
    seconds: float = 86_400.0


class Row(NamedTuple):
    """A stored response; `worker` is generating it, None once it is finished."""

    id: str
    owner: str
    previous: str | None
    worker: str | None
    body: str


class ResponseTable:
    """Every call is one transaction. Used from one thread at a time."""

    def __init__(self, path: str = ":memory:", bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        # nothing must survive a crash, so nothing waits for the disk
        for pragma in ("journal_mode=WAL", "synchronous=OFF", "foreign_keys=ON"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_TABLES)

    def put(self, row: Row, item_ids: Iterable[str]) -> None:
        """Insert or replace it, then evict what exceeds the bounds."""
        now = time.monotonic()  # the same clock in all processes of a machine
        with self._transaction():
            self._db.execute("DELETE FROM responses WHERE id = ? OR stored < ?", (row.id, self._since()))
            self._db.execute(
                "INSERT INTO responses(id, owner, previous, worker, stored, used, size, body) VALUES(?,?,?,?,?,?,?,?)",
                (*row[:4], now, now, len(row.body.encode()), row.body),
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO items(owner, id, response) VALUES(?,?,?)",
                [(row.owner, item_id, row.id) for item_id in item_ids],
            )
            self._shrink()

    def find(self, response_id: str, owner: str) -> Row | None:
        return next(iter(self._rows([response_id], owner)), None)

    def find_by_item(self, item_id: str, owner: str) -> Row | None:
        """The response that has the item in its input or output."""
        query = "SELECT response FROM items WHERE owner = ? AND id = ?"
        found = self._db.execute(query, (owner, item_id)).fetchone()
        return self.find(found[0], owner) if found else None

    def chain(self, response_id: str, owner: str) -> tuple[list[Row], str | None]:
        """The response and those before it, oldest first; and the one that is missing, if one is."""
        asked = {"id": response_id, "owner": owner, "since": self._since(), "most": self._bounds.entries}
        links = self._db.execute(_CHAIN, asked).fetchall()
        if not links:
            return [], response_id
        rows = {row.id: row for row in self._rows([link[0] for link in links], owner)}
        return [rows[link[0]] for link in reversed(links) if link[0] in rows], links[-1][1]

    def delete(self, response_id: str, owner: str) -> bool:
        return bool(self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount)

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM responses").fetchone()[0])

    def close(self) -> None:
        self._db.close()

    def _rows(self, ids: list[str], owner: str) -> list[Row]:
        """Those of `ids` that exist; marks them as used."""
        now, since, rows = time.monotonic(), self._since(), []
        query = "SELECT id, owner, previous, worker, body FROM responses WHERE id = ? AND owner = ? AND stored >= ?"
        with self._transaction():
            for one in ids:
                found = self._db.execute(query, (one, owner, since)).fetchone()
                if found:
                    rows.append(Row(*found))
                    self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (now, one))
        return rows

    def _since(self) -> float:
        return time.monotonic() - self._bounds.seconds

    def _shrink(self) -> None:
        count, size = self._db.execute("SELECT COUNT(*), SUM(size) FROM responses").fetchone()
        while count > self._bounds.entries or (size > self._bounds.size and count > 1):
            oldest, its_size = self._db.execute("SELECT id, size FROM responses ORDER BY used LIMIT 1").fetchone()
            self._db.execute("DELETE FROM responses WHERE id = ?", (oldest,))
            count, size = count - 1, size - its_size

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
