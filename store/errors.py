"""Messages for users for the errors of database drivers."""

import asyncio
import sqlite3
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from llmops.errors import InputError, LlmopsError, ResourceError
from llmops.store.store_url import StoreUrl

# Parts of SQLite's messages, with the error and sentence for users. The first part that a message
# contains decides.
_SQLITE: tuple[tuple[str, type[LlmopsError], str], ...] = (
    ("not a database", InputError, "is not a SQLite database; name another file."),
    ("malformed", ResourceError, "is damaged; restore it from a backup (`sqlite3 FILE .recover` saves what can be)."),
    (
        "readonly",
        ResourceError,
        "cannot be written: the file or its folder is read-only for this user; give the user the right to write.",
    ),
    (
        "unable to open",
        InputError,
        "cannot be opened: it is a folder, or this user may not read it; name another file.",
    ),
    (
        "is full",
        ResourceError,
        "cannot be written: the disk is full. The last change is undone; free space and repeat it.",
    ),
    (
        "disk I/O error",
        ResourceError,
        "cannot be written: the disk is full or fails. The last change is undone; check the disk.",
    ),
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
        (asyncpg.InsufficientPrivilegeError, asyncpg.ReadOnlySQLTransactionError),
        ResourceError,
        "does not let this user write; grant CREATE on the database and access to its tables, on the primary server.",
    ),
    (
        (ssl.SSLError,),
        InputError,
        "has a TLS certificate that is not trusted here; set PGSSLROOTCERT to its authority, or use sslmode=require.",
    ),
    (
        (
            *(asyncpg.InsufficientResourcesError, asyncpg.OperatorInterventionError),
            *(asyncpg.TransactionRollbackError, asyncpg.LockNotAvailableError),
        ),
        ResourceError,
        "is busy, starting or stopping, or has no disk space or connection left; see its log and try again.",
    ),
    (
        (asyncpg.InternalServerError,),
        ResourceError,
        "has damaged data; PostgreSQL's log names the table. REINDEX repairs an index; restore other data.",
    ),
    (
        (OSError, asyncio.TimeoutError, asyncpg.ConnectionDoesNotExistError, asyncpg.InterfaceError),
        ResourceError,
        "cannot be reached; start PostgreSQL there, or correct host and port in the store's URL.",
    ),
)


@contextmanager
def translate_database_errors(location: StoreUrl) -> Iterator[None]:
    """Turn driver errors that users can solve into InputError or ResourceError.

    Such errors are a wrong URL and an unreachable or full database. Errors that only a bug can
    cause, such as a syntax error, pass unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        # SQLite's async driver starts a thread for each connection
        if "start new thread" not in str(error):
            raise
        reason = "cannot be used: this process cannot start a thread; raise its limit of memory or threads."
        raise ResourceError(f"The store {location} {reason}") from error
    except (TimeoutError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        cause = _driver_error(error)
        match = _sqlite(cause) if location.file else _postgres(cause)
        if match is None:
            raise
        kind, sentence = match
        # the driver's text is left out: it can contain values and, with asyncpg, the user's name
        raise kind(f"The store {location} {sentence}") from error


@contextmanager
def keep_cancellation() -> Iterator[None]:
    """Raise CancelledError for errors of a cancelled task, as those of the rollback are.

    If the server has closed the connection, the error of the rollback replaces the cancellation,
    and a task that retries after errors would never end.
    """
    try:
        yield
    except Exception as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        raise


def is_data_error(error: BaseException) -> bool:
    """Return True if the data of a statement caused the error, and the database works."""
    if isinstance(error, LlmopsError):
        return False
    return not isinstance(error, SQLAlchemyError) or _is_driver_data_error(_driver_error(error))


def is_text_error(error: BaseException | None) -> bool:
    """Return True if PostgreSQL refused a text for its bytes or for a character."""
    kinds = (asyncpg.StringDataRightTruncationError, asyncpg.CharacterNotInRepertoireError)
    return error is not None and isinstance(_driver_error(error), (*kinds, asyncpg.UntranslatableCharacterError))


def _is_driver_data_error(error: BaseException) -> bool:
    # asyncpg's DataError for values that it cannot encode is an InterfaceError and a ValueError
    is_client_error = isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)
    kinds = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, sqlite3.DataError, sqlite3.IntegrityError)
    return is_client_error or isinstance(error, (*kinds, OverflowError, UnicodeError, TypeError))


def _driver_error(error: BaseException) -> BaseException:
    """Return the driver's error that SQLAlchemy's error wraps."""
    while True:
        inner = error.orig if isinstance(error, DBAPIError) else error.__cause__
        # the cause of a connection timeout is only the cancellation that the timeout itself made
        if inner is None or isinstance(error, (sqlite3.Error, asyncpg.PostgresError, asyncio.TimeoutError)):
            return error
        error = inner


def _sqlite(error: BaseException) -> tuple[type[LlmopsError], str] | None:
    if not isinstance(error, sqlite3.Error):
        return None
    return next(((kind, sentence) for part, kind, sentence in _SQLITE if part in str(error)), None)


def _postgres(error: BaseException) -> tuple[type[LlmopsError], str] | None:
    if isinstance(error, ConnectionError) and "SSL upgrade" in str(error):
        return InputError, "does not support TLS, which sslmode requires; change sslmode in the store's URL."
    if _is_driver_data_error(error):
        return None
    return next(((kind, sentence) for causes, kind, sentence in _POSTGRES if isinstance(error, causes)), None)
