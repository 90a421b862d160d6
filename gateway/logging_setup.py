"""Logging for people to read: time, level, logger and message, with untrusted text escaped."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextvars import ContextVar
from time import monotonic
from typing import Any

from llmops.untrusted_text import escape_unsafe

#: The id of the request that the current task serves, empty outside of requests.
current_request: ContextVar[str] = ContextVar("current_request", default="")

#: Characters of a message, which can contain text of a client.
MAX_LOG_MESSAGE_CHARACTERS = 4096
#: Characters of a traceback.
MAX_TRACEBACK_CHARACTERS = 32_768


class SafeFormatter(logging.Formatter):
    """A formatter that escapes control characters and truncates long messages.

    Untrusted text cannot forge a line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        record.message = escape_unsafe(record.message, MAX_LOG_MESSAGE_CHARACTERS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Return a traceback. Its lines are indented, because the error's text can have line breaks."""
        text = escape_unsafe(super().formatException(ei), MAX_TRACEBACK_CHARACTERS, lines=True)
        return text.replace("\n", "\n  ")


class RepeatedLines:
    """Leaves out log lines that callers cause again and again, and counts them."""

    def __init__(self, interval: float) -> None:
        """Allow one line of each kind in `interval` seconds."""
        self._interval = interval
        self._last: dict[Hashable, tuple[float, int]] = {}

    def suffix(self, kind: Hashable) -> str | None:
        """Return what a line of this kind ends with, None if it is left out."""
        now = monotonic()
        last, left_out = self._last.get(kind, (-self._interval, 0))
        if now - last < self._interval:
            self._last[kind] = last, left_out + 1
            return None
        self._last[kind] = now, 0
        return f" ({left_out} more since the last such line)" if left_out else ""


def configure_logging(level: str) -> None:
    """Set up the process's logging; only command-line entry points call this."""
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty in ("httpx", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
