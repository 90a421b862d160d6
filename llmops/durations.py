"""Durations as people write them: `500ms`, `0.5s`, `2m`, or a bare number of seconds."""

from __future__ import annotations

import re

_UNITS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: object) -> float:
    """Raises ValueError unless it is a duration above zero."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(ms|s|m|h)?", str(text).strip())
    value = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    if value <= 0:
        raise ValueError(f"{text!r} is not a duration; write 500ms or 0.5s")
    return value
