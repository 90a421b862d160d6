"""A name that is nearly one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(typed: str, known: Sequence[str]) -> str:
    """A remark for the sentence that `typed` is unknown; empty where nothing is close."""
    close = difflib.get_close_matches(typed, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""
