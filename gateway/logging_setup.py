"""Logs that a person can read: time, level, who, what."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from llmops.untrusted_text import escape_unsafe

#: the id of the request that is being answered; empty outside of any
current_request: ContextVar[str] = ContextVar("current_request", default="")

#: Characters of the longest message and of the longest traceback. A message can hold what a stranger sent.
MAX_LOG_MESSAGE_CHARACTERS, MAX_TRACEBACK_CHARACTERS = 4096, 32_768


class SafeFormatter(logging.Formatter):
    """Escapes control characters, so that a text of a stranger is no line of its own, and cuts what is too long."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of the record."""
        record.message = escape_unsafe(record.message, MAX_LOG_MESSAGE_CHARACTERS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Return the traceback, whose lines stay lines."""
        return escape_unsafe(super().formatException(ei), MAX_TRACEBACK_CHARACTERS, lines=True)


def configure_logging(level: str) -> None:
    """Set up the process's logging; only command-line entry points call this."""
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty in ("httpx", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
