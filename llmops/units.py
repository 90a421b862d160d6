"""Durations such as `500ms` and amounts of money, as users read and write them.

Command-line options, llmops.yaml and the gateway's settings share one rule for durations: a number
without a unit is rejected, because 500 could mean seconds in one place and milliseconds in another.
Money is stored in whole micro-dollars.
"""

import re
from typing import Any

#: Regular expression that matches a duration with its unit.
DURATION_PATTERN = r"(?:[0-9]*\.)?[0-9]+ *(ms|s|m|h)"
#: Number of micro-dollars in a dollar.
MICROS_PER_USD = 1_000_000
_SECONDS_PER_UNIT = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Seconds(float):
    """A number of seconds that is written with a unit. The type also validates pydantic fields."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        text = core_schema.str_schema(pattern=f"^({DURATION_PATTERN}|0)$")
        as_text = core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        return core_schema.no_info_plain_validator_function(
            parse_duration, json_schema_input_schema=text, serialization=as_text
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": ["string", "integer"], "pattern": f"^({DURATION_PATTERN}|0)$", "maximum": 0}

    def __str__(self) -> str:
        value = float(self)
        return f"{value:g}s" if value >= 1 or not value else f"{1000 * value:g}ms"


def parse_duration(value: object) -> Seconds:
    """Return the seconds that a text with a unit stands for. 0 needs no unit.

    Args:
        value: The text, or a `Seconds` that has been parsed before.

    Raises:
        ValueError: The text has no unit, or is not a duration. The message says what to write.
    """
    if isinstance(value, Seconds):
        return value
    text = str(value).strip()
    if re.fullmatch(r"0+(\.0*)?", text):
        return Seconds(0.0)
    if match := re.fullmatch(DURATION_PATTERN, text):
        return Seconds(float(text.removesuffix(match[1])) * _SECONDS_PER_UNIT[match[1]])
    if re.fullmatch(r"(?:[0-9]*\.)?[0-9]+", text):
        raise ValueError(f"{text} has no unit; write {text}ms or {text}s")
    raise ValueError(f"{text!r} is not a duration; write 500ms or 0.5s")


def format_usd(micros: int) -> str:
    """Format an amount of micro-dollars exactly, with at least two decimals: `$0.000019`, `$50.00`."""
    dollars, rest = divmod(micros, MICROS_PER_USD)
    return f"${dollars:,}.{f'{rest:06}'.rstrip('0'):0<2}"
