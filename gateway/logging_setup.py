"""Logging for people to read: time, level, logger and message, with untrusted text escaped."""

from __future__ import annotations

import logging
from contextvars import ContextVar
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
        """Return a traceback, in which line breaks are kept."""
        return escape_unsafe(super().formatException(ei), MAX_TRACEBACK_CHARACTERS, lines=True)


def configure_logging(level: str) -> None:
    """Set up the process's logging; only command-line entry points call this."""
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty in ("httpx", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
