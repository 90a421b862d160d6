"""Option types of `key`, `tenant`, `price` and `usage`: limits, budgets, times and amounts.

An invalid value is rejected in one sentence with an example.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

import click

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

#: The longest accepted duration in seconds. Longer durations are probably typing errors, and could
#: exceed the last date that Python knows.
MAX_DURATION = timedelta(days=3650)


class NoLimit:
    """The type of NO_LIMIT, the value of `none`, `all` and `never`, which remove a limit.

    An option that was not given has the value None instead.
    """


NO_LIMIT = NoLimit()


def typed_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options. A value of None stands for a limit to remove."""
    return {name: None if value is NO_LIMIT else value for name, value in options.items() if value is not None}


class ExampleParamType(click.ParamType):
    """A parameter type that rejects invalid values with an example of a valid value."""

    def __init__(self, name: str, example: str, parse: Callable[[str], Any], unlimited: str | None = None) -> None:
        """Create the parameter type.

        Args:
            name: The name of the values in help texts.
            example: The end of the error "'VALUE' is not …", with a valid value.
            parse: Returns the value of a text, or raises ValueError for an invalid text.
            unlimited: The word that stands for NO_LIMIT, or None.
        """
        self.name, self._example, self._parse, self._unlimited = name, example, parse, unlimited

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if value == self._unlimited:
            return NO_LIMIT
        try:
            return self._parse(value)
        except ValueError:
            self.fail(f"{value!r} is not {self._example}.", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name.upper()


def micro_dollars(text: str) -> int | None:
    """Return US dollars in micro-dollars, or None for invalid text.

    An amount has at most six decimals.
    """
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or len(text) > 20:
        return None
    try:
        micros = Decimal(text) * 1_000_000
    except InvalidOperation:
        return None
    return int(micros) if micros == int(micros) else None


def _limit(text: str) -> int:
    if not re.fullmatch(r"-?[0-9_,]+", text):
        raise ValueError
    return int(text.replace(",", "").replace("_", ""))


def _budget(text: str) -> dict[str, Any]:
    from llmops.store.accounts.limits import PERIODS

    amount, _, period = text.partition("/")
    micros = micro_dollars(amount.removeprefix("$"))
    if micros is None or period not in PERIODS:
        raise ValueError
    return {"micros": micros, "period": period}


def _dollars(text: str) -> Decimal:
    amount = text.removeprefix("$")
    if micro_dollars(amount) is None:
        raise ValueError
    return Decimal(amount)


def _duration(text: str) -> timedelta:
    if text == "0":
        return timedelta(0)
    found = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    length = timedelta(**{_UNITS[found[2]]: int(found[1])}) if found else None
    if length is None or length > MAX_DURATION:
        raise ValueError
    return length


def _timestamp(text: str) -> datetime:
    with suppress(ValueError):
        if length := _duration(text):
            return datetime.now(UTC) + length
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise ValueError
    return names


#: A whole number, or `none`. The store checks the number's bounds.
LIMIT = ExampleParamType("n", "a limit; write a whole number, or none for no limit", _limit, "none")
#: A budget per day, week or month, such as `50/month`. The currency sign is optional: `$0.5/day`.
BUDGET = ExampleParamType(
    "$/period", "a budget; write US dollars per day, week or month, e.g. 50/month, or none", _budget, "none"
)
#: An exact amount of US dollars.
DOLLARS = ExampleParamType("$", "an amount; write US dollars with at most six decimals, e.g. 0.6", _dollars)
#: A duration such as `90d`, `12h`, `30m`, `2w` or `0`, in seconds.
DURATION = ExampleParamType("duration", "a duration of at most ten years; write 30m, 12h, 90d or 2w", _duration)
_TIMESTAMP_EXAMPLE = "a time; write 90d or 12h from now, or a date (UTC) such as 2027-01-31"
#: A time from now (`90d`) or a UTC date (`2027-01-31`, `2027-01-31T12:00`).
TIMESTAMP = ExampleParamType("when", _TIMESTAMP_EXAMPLE, _timestamp)
#: A time from now or a UTC date, or `never`.
EXPIRY = ExampleParamType("when", _TIMESTAMP_EXAMPLE, _timestamp, "never")
#: A day in UTC, such as `2026-11-30`.
DAY = ExampleParamType("day", "a day; write 2026-11-30", date.fromisoformat)
_NAMES_EXAMPLE = "a list of names; write them with commas between them"
#: Names separated by commas.
NAMES = ExampleParamType("name,…", _NAMES_EXAMPLE, _names)
#: Names separated by commas, or `all`.
NAMES_OR_ALL = ExampleParamType("name,…", _NAMES_EXAMPLE, _names, "all")
