"""URLs of stores, and their translation for SQLAlchemy's async drivers.

A URL is `sqlite:///FILE` or `postgresql://…`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from llmops.errors import InputError, ResourceError
from llmops.output_files import is_put_by_another

EXPECTED_FORMS = "write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
_POSTGRES = ("postgresql", "postgres", "postgresql+asyncpg")
_SQLITE = ("sqlite", "sqlite+aiosqlite")
_TLS = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
# Behind a PgBouncer that shares connections between transactions, prepared_statement_cache_size
# must be 0.
_OPTIONS = ("ssl", "prepared_statement_cache_size")


@dataclass(frozen=True)
class StoreUrl:
    """A store's URL for the async drivers. `str(url)` is safe to show: it has no password."""

    url: URL

    @property
    def file(self) -> Path | None:
        """Return the SQLite file, or None for PostgreSQL."""
        return Path(str(self.url.database)) if self.url.drivername in _SQLITE else None

    @property
    def place(self) -> str:
        """Return a text that names the database, without options, and is the same for all spellings of a file."""
        if self.file:
            return str(self.file.resolve())
        return f"{self.url.host or self.url.query.get('host')}:{self.url.port or 5432}/{self.url.database}"

    @property
    def pooled(self) -> bool:
        """Return True if transactions may use different connections of the server (PgBouncer)."""
        return self.url.query.get("prepared_statement_cache_size") == "0"

    def __str__(self) -> str:
        if self.file:
            return str(self.file)
        # the query is left out as well, because it can contain a password
        return self.url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Parse a URL. Messages never quote the text, because it may contain a password.

        Raises:
            InputError: The text is not the URL of a SQLite file or a PostgreSQL database.
        """
        if not url.strip():
            raise InputError(f"--store or LLMOPS_STORE is empty; leave it out for no store, or {EXPECTED_FORMS}.")
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            raise InputError(f"The store is not a URL; {EXPECTED_FORMS}.") from None
        if parsed.drivername in _SQLITE:
            if not parsed.database or parsed.database == ":memory:" or parsed.host:
                raise InputError(
                    f"The store's URL names no file; {EXPECTED_FORMS} (four slashes for an absolute path)."
                )
            _refuse_options(parsed.query, ())
            return cls(parsed.set(drivername="sqlite+aiosqlite"))
        if parsed.drivername not in _POSTGRES:
            raise InputError(f"The store cannot be {parsed.drivername}; {EXPECTED_FORMS}.")
        if "@" in f"{parsed.host}{parsed.database}{parsed.query}":
            # Messages show host, database and options, which would have the end of the password.
            raise InputError(
                "The store's URL has more than one @; write @ and / in the user and the password as %40 and %2F."
            )
        return cls(_asyncpg(parsed))

    def create(self) -> None:
        """Create the SQLite file, readable by its owner only, because it contains conversations.

        Raises:
            InputError: The folder does not exist, or an existing file cannot be read.
            ResourceError: The file cannot be written, or another user made it in a sticky folder,
                or made one of SQLite beside it.
        """
        if self.file is None:
            return
        if self.file.is_dir() or (self.file.exists() and not os.access(self.file, os.R_OK)):
            raise InputError(
                f"The store {self.file} cannot be opened: it is a folder, or this user may not read it; name a file."
            )
        if not self.file.parent.is_dir():
            raise InputError(
                f"{self.file} cannot be created: the folder {self.file.parent} does not exist; create it first."
            )
        for kind in ("", "-shm", "-wal", "-journal"):
            path = Path(f"{self.file}{kind}")
            # each is false for a file that another process removes now, as the last one to close a store does
            if path.is_dir() or path.is_fifo() or path.is_socket() or path.is_char_device() or path.is_block_device():
                raise InputError(f"{path} is a folder, pipe or device, and SQLite needs a file there; move it away.")
            if kind and _is_planted(Path(f"{self.file.resolve()}{kind}"), self.file):
                raise ResourceError(
                    f"{path} was made by another user than the store, and SQLite would write its content into the "
                    "store; remove it, or move the store into a folder of its own."
                )
        if any(map(is_put_by_another, {self.file, self.file.resolve()})):
            raise ResourceError(
                f"The store {self.file} was made by another user in a folder that all may write to; name a file "
                "in a folder of this user, or move the store there."
            )
        if not self.file.exists():
            self._touch(self.file)

    def _touch(self, file: Path) -> None:
        try:
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise ResourceError(
                f"The store {file} cannot be created ({error.strerror}); name a folder that this user may write to."
            ) from error


def _asyncpg(url: URL) -> URL:
    """Translate libpq's `sslmode`, which many providers put into URLs, to asyncpg's `ssl`.

    Raises:
        InputError: The URL has an unknown option.
    """
    query = {name: value if isinstance(value, str) else value[-1] for name, value in url.query.items()}
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    _refuse_options(query, _OPTIONS)
    if query.get("ssl", _TLS[0]) not in _TLS:
        raise InputError(f"The store's URL has an unknown sslmode; use one of {', '.join(_TLS)}.")
    if not query.get("prepared_statement_cache_size", "0").isdecimal():
        raise InputError(
            "The store's URL has a prepared_statement_cache_size that is not a number; write 0 or a larger number."
        )
    return url.set(drivername="postgresql+asyncpg", query=query)


def _refuse_options(query: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(set(query) - set(known))
    if unknown:
        names = " and ".join(known) or "none"
        raise InputError(f"The store's URL has unknown options ({', '.join(unknown)}); known are {names}.")


def _is_planted(side_file: Path, store: Path) -> bool:
    """Return True if a file of SQLite belongs neither to this user, root, nor the store's owner."""
    owners = {0, os.getuid()}
    with suppress(FileNotFoundError):
        owners.add(store.stat().st_uid)
    with suppress(FileNotFoundError):
        return side_file.lstat().st_uid not in owners
    return False
