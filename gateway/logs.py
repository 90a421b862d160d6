"""Logs that a person can read: time, level, who, what."""

from __future__ import annotations

import logging
from contextvars import ContextVar

#: the id of the request that is being answered; empty outside of any
current_request: ContextVar[str] = ContextVar("current_request", default="")


def configure_logging(level: str) -> None:
    """Set up the process's logging; only command-line entry points call this."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    for chatty in ("httpx", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
