"""Logs that a person can read: time, level, who, what."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """Set up the process's logging; only command-line entry points call this."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
