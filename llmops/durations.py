"""Durations as people write them: `500ms`, `0.5s`, `2m`, `1h`. A number without a unit is refused.

One rule for options, llmops.yaml and the gateway's settings: 500 was seconds in one place and milliseconds in another.
"""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
#: A regular expression of a duration.
DURATION_PATTERN = r"[0-9]*\.?[0-9]+ *(ms|s|m|h)"


class Seconds(float):
    """A number of seconds that is written with its unit, also as a field of a pydantic model."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        text = core_schema.str_schema(pattern=f"^({DURATION_PATTERN}|0)$")
        written = core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        return core_schema.no_info_plain_validator_function(
            seconds, json_schema_input_schema=text, serialization=written
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": ["string", "integer"], "pattern": f"^({DURATION_PATTERN}|0)$", "maximum": 0}

    def __str__(self) -> str:
        value = float(self)
        return f"{value:g}s" if value >= 1 or not value else f"{1000 * value:g}ms"


def seconds(given: object) -> Seconds:
    """Return the seconds that a text with a unit stands for; 0 needs no unit.

    Args:
        given: The text, or seconds that were parsed before.

    Raises:
        ValueError: The text has no unit or is no duration. The message says what to write.
    """
    if isinstance(given, Seconds):
        return given
    text = str(given).strip()
    if re.fullmatch(r"0+(\.0*)?", text):
        return Seconds(0.0)
    if found := re.fullmatch(DURATION_PATTERN, text):
        return Seconds(float(text.removesuffix(found[1])) * _UNITS[found[1]])
    if re.fullmatch(r"[0-9]*\.?[0-9]+", text):
        raise ValueError(f"{text} has no unit; write {text}ms or {text}s")
    raise ValueError(f"{text!r} is not a duration; write 500ms or 0.5s")
