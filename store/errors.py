"""Errors of database drivers, as one sentence for the user."""

import asyncio
import socket
import sqlite3
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from llmops.errors import InputError, LlmopsError, ResourceError
from llmops.store.store_url import StoreUrl

# Parts of SQLite's messages and their meaning. The first one that a message contains counts.
_SQLITE: tuple[tuple[str, type[LlmopsError], str], ...] = (
    ("not a database", InputError, "is not a SQLite database; name another file."),
    ("malformed", ResourceError, "is damaged; restore it from a backup (`sqlite3 FILE .recover` saves what can be)."),
    ("readonly", ResourceError, "cannot be written: the file or its folder is read-only for this user."),
    ("unable to open", InputError, "cannot be opened: it is a folder, or not this user's to read."),
    ("is full", ResourceError, "cannot be written: the disk is full. Nothing of the last change was kept."),
    ("disk I/O error", ResourceError, "cannot be written: the disk is full or fails. Nothing of the change was kept."),
    ("is locked", ResourceError, "is held by another process; try again when that is done."),
)
_POSTGRES: tuple[tuple[tuple[type[BaseException], ...], type[LlmopsError], str], ...] = (
    (
        (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError),
        InputError,
        "refuses this user or password; correct them in the store's URL.",
    ),
    ((asyncpg.InvalidCatalogNameError,), InputError, "has no such database; `createdb` it first."),
    (
        (asyncpg.InsufficientPrivilegeError,),
        InputError,
        "does not let this user do that; grant it CREATE and its tables.",
    ),
    ((asyncpg.ReadOnlySQLTransactionError,), ResourceError, "is read-only, a replica perhaps; name the primary."),
    (
        (ssl.SSLError,),
        InputError,
        "has a TLS certificate that is not trusted here; name its authority in PGSSLROOTCERT, or sslmode=require.",
    ),
    ((asyncpg.DiskFullError,), ResourceError, "has a full disk. Nothing of the last change was kept."),
    ((asyncpg.TooManyConnectionsError,), ResourceError, "has no connection left; raise max_connections."),
    (
        (asyncpg.CannotConnectNowError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError),
        ResourceError,
        "is starting or stopping; try again.",
    ),
    (
        (asyncpg.TransactionRollbackError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError),
        ResourceError,
        "is busy: it gave up a transaction that waited for another; try again.",
    ),
    (
        (asyncpg.InternalServerError,),
        ResourceError,
        "has damaged data; PostgreSQL's own log names the place. REINDEX mends an index, and a backup the rest.",
    ),
    (
        (socket.gaierror,),
        ResourceError,
        "cannot be reached: its host name has no address; correct the name in the store's URL.",
    ),
    (
        (ConnectionRefusedError,),
        ResourceError,
        "cannot be reached: nothing listens there; start PostgreSQL, or correct host and port in the store's URL.",
    ),
    (
        (OSError, asyncio.TimeoutError, asyncpg.ConnectionDoesNotExistError, asyncpg.InterfaceError),
        ResourceError,
        "cannot be reached; start PostgreSQL there, or correct the store's URL.",
    ),
)


@contextmanager
def translate_database_errors(location: StoreUrl) -> Iterator[None]:
    """Turn driver errors of a wrong, unreachable or full database into InputError or ResourceError.

    Errors that only a bug can cause, such as a syntax error, keep their traceback.
    """
    try:
        yield
    except RuntimeError as error:
        # each connection of SQLite has a thread
        if "start new thread" not in str(error):
            raise
        reason = "cannot be asked: this process can start no thread; raise its limit of memory or of threads."
        raise ResourceError(f"The store {location} {reason}") from error
    except (TimeoutError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        cause = _driver_error(error)
        match = _sqlite(cause) if location.file else _postgres(cause)
        if match is None:
            raise
        kind, sentence = match
        # without the driver's text, which can contain values and, with asyncpg, the user's name
        raise kind(f"The store {location} {sentence}") from error


def is_data_error(error: BaseException) -> bool:
    """Return True if the data of a statement caused the error, and the database itself works."""
    if isinstance(error, LlmopsError):
        return False
    return not isinstance(error, SQLAlchemyError) or _is_driver_data_error(_driver_error(error))


def _is_driver_data_error(error: BaseException) -> bool:
    # asyncpg's own DataError is an InterfaceError and a ValueError
    is_client_error = isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)
    kinds = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, sqlite3.DataError, sqlite3.IntegrityError)
    return is_client_error or isinstance(error, (*kinds, OverflowError, UnicodeError, TypeError))


def _driver_error(error: BaseException) -> BaseException:
    """Return the driver's error inside SQLAlchemy's."""
    while True:
        inner = error.orig if isinstance(error, DBAPIError) else error.__cause__
        # a connection timeout is raised from its own cancellation
        if inner is None or isinstance(error, (sqlite3.Error, asyncpg.PostgresError, asyncio.TimeoutError)):
            return error
        error = inner


def _sqlite(error: BaseException) -> tuple[type[LlmopsError], str] | None:
    if not isinstance(error, sqlite3.Error):
        return None
    return next(((kind, sentence) for part, kind, sentence in _SQLITE if part in str(error)), None)


def _postgres(error: BaseException) -> tuple[type[LlmopsError], str] | None:
    if isinstance(error, ConnectionError) and "SSL upgrade" in str(error):
        return InputError, "does not speak TLS, which sslmode asks for."
    if _is_driver_data_error(error):
        return None
    return next(((kind, sentence) for causes, kind, sentence in _POSTGRES if isinstance(error, causes)), None)
