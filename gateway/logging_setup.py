"""Logging in lines of time, level, logger and message, with untrusted text escaped."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Hashable
from contextvars import ContextVar
from time import monotonic
from typing import Any

from llmops.background_output import write_in_background
from llmops.untrusted_text import escape_unsafe

#: The id of the request that the current task serves, empty outside of requests.
current_request: ContextVar[str] = ContextVar("current_request", default="")

#: Maximum length of a logged message, in characters. Bounds the log, because a message can contain
#: text from a client.
MAX_LOG_MESSAGE_CHARACTERS = 4096
#: Maximum length of a logged traceback, in characters. Bounds the log, because an error's text can
#: contain text from a client.
MAX_TRACEBACK_CHARACTERS = 32_768


class SafeFormatter(logging.Formatter):
    """A formatter that escapes control characters and truncates long messages.

    Escaping prevents untrusted text from forging a log line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the log line of a record."""
        record.message = escape_unsafe(record.message, MAX_LOG_MESSAGE_CHARACTERS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Return a traceback with indented lines.

        The indentation marks the lines as parts of a traceback, because an error's text can contain
        line breaks.
        """
        text = escape_unsafe(super().formatException(ei), MAX_TRACEBACK_CHARACTERS, lines=True)
        return text.replace("\n", "\n  ")


class RepeatedLines:
    """A limit on log lines that callers can cause repeatedly. Omitted lines are counted."""

    def __init__(self, interval: float) -> None:
        """Allow one line of each kind per `interval` seconds."""
        self._interval = interval
        self._last: dict[Hashable, tuple[float, int]] = {}

    def suffix(self, kind: Hashable) -> str | None:
        """Return the text to append to a line of this kind, or None if the line is omitted."""
        now = monotonic()
        last, left_out = self._last.get(kind, (-self._interval, 0))
        if now - last < self._interval:
            self._last[kind] = last, left_out + 1
            return None
        self._last[kind] = now, 0
        return f" ({left_out} more since the last such line)" if left_out else ""


#: The lines that requests can repeat without end: one line of each kind per second.
REQUEST_LINES = RepeatedLines(1.0)


def _limit(record: logging.LogRecord, *place: Hashable) -> bool:
    suffix = REQUEST_LINES.suffix((record.name, *place))
    record.msg = f"{record.msg}{suffix}"
    return suffix is not None


class RepeatedTracebacks(logging.Filter):
    """A filter that passes one traceback per second of each place where a request raised an exception.

    A request that meets a fault of the gateway can be repeated without end. Faults outside of
    requests all pass: several outboxes may fail at the same place.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if not (current_request.get() and record.exc_info and record.exc_info[2] is not None):
            return True
        *_, (frame, line) = traceback.walk_tb(record.exc_info[2])
        return _limit(record, frame.f_code, line)


def request_logger(name: str) -> logging.Logger:
    """Return the logger of a module whose lines requests can repeat.

    Each place in the module logs one line per second. `RepeatedTracebacks` limits tracebacks.
    """
    log = logging.getLogger(name)
    log.addFilter(lambda record: bool(record.exc_info) or _limit(record, record.lineno))
    return log


def configure_logging(level: str) -> None:
    """Set up logging of the process to standard error. Only entry points of commands call this.

    No logger waits for the reader of standard error.
    """
    write_in_background()
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    handler.addFilter(RepeatedTracebacks())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty in ("httpx", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
