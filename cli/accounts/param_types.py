"""Option types of `key`, `tenant`, `price` and `usage`: limits, budgets, times and amounts.

An invalid value is rejected in one sentence with an example.
"""

import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

import click

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

#: The longest accepted duration: longer ones are probably typing errors, and dates have an end.
MAX_DURATION = timedelta(days=3650)


class NoLimit:
    """The value of `none`, `all` or `never`, which removes a limit. An absent option is None."""


NO_LIMIT = NoLimit()


def typed_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given. None stands for a limit to remove."""
    return {name: None if value is NO_LIMIT else value for name, value in options.items() if value is not None}


class _ExampleParamType(click.ParamType):
    """A type that rejects a value with an example of a valid one."""

    example = ""

    def refuse(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NoReturn:
        self.fail(f"{value!r} is not {self.example}.", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name.upper()


class LimitType(_ExampleParamType):
    """A whole number, or `none`. The store checks its bounds."""

    name = "n"
    example = "a limit; write a whole number, or none for no limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | NoLimit:
        if value == "none":
            return NO_LIMIT
        if not re.fullmatch(r"-?[0-9_,]+", str(value)):
            self.refuse(value, param, ctx)
        return int(str(value).replace(",", "").replace("_", ""))


class BudgetType(_ExampleParamType):
    """A budget in US dollars per day, week or month, such as `50/month`, or `none`.

    The currency sign is optional: `$0.5/day`.
    """

    name = "$/period"
    example = "a budget; write US dollars per day, week or month, e.g. 50/month, or none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict | NoLimit:
        from llmops.store.accounts.limits import PERIODS

        if value == "none":
            return NO_LIMIT
        amount, _, period = str(value).partition("/")
        micros = micro_dollars(amount.removeprefix("$"))
        if micros is None or period not in PERIODS:
            self.refuse(value, param, ctx)
        return {"micros": micros, "period": period}


class DollarsType(_ExampleParamType):
    """An exact amount of US dollars."""

    name = "$"
    example = "an amount; write US dollars with at most six decimals, e.g. 0.6"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Decimal:
        amount = str(value).removeprefix("$")
        if micro_dollars(amount) is None:
            self.refuse(value, param, ctx)
        return Decimal(amount)


class DurationType(_ExampleParamType):
    """A duration such as `90d`, `12h`, `30m`, `2w` or `0`."""

    name = "duration"
    example = "a duration of at most ten years; write 30m, 12h, 90d or 2w"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        length = _duration(str(value))
        if length is None:
            self.refuse(value, param, ctx)
        return length


class TimestampType(_ExampleParamType):
    """A time from now (`90d`) or a UTC date (`2027-01-31`, `2027-01-31T12:00`).

    The word `never` is valid too if it is allowed.
    """

    name = "when"
    example = "a time; write 90d or 12h from now, or a date (UTC) such as 2027-01-31"

    def __init__(self, never: bool = False) -> None:
        self.never = never

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime | NoLimit:
        if isinstance(value, datetime):
            return value
        if value == "never" and self.never:
            return NO_LIMIT
        if length := _duration(str(value)):
            return datetime.now(UTC) + length
        try:
            found = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        except ValueError:
            self.refuse(value, param, ctx)
        return found if found.tzinfo else found.replace(tzinfo=UTC)


class DayType(_ExampleParamType):
    """A UTC day."""

    name = "day"
    example = "a day; write 2026-11-30"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date:
        try:
            return value if isinstance(value, date) else date.fromisoformat(str(value))
        except ValueError:
            self.refuse(value, param, ctx)


class NamesType(_ExampleParamType):
    """Names separated by commas, or `all` if that is allowed."""

    name = "name,…"
    example = "a list of names; write them with commas between them"

    def __init__(self, everything: bool = False) -> None:
        self.everything = everything

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...] | NoLimit:
        if isinstance(value, tuple):
            return value
        if value == "all" and self.everything:
            return NO_LIMIT
        names = tuple(dict.fromkeys(name.strip() for name in str(value).split(",")))
        if not all(names):
            self.refuse(value, param, ctx)
        return names


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


def _duration(text: str) -> timedelta | None:
    if text == "0":
        return timedelta(0)
    found = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    length = timedelta(**{_UNITS[found[2]]: int(found[1])}) if found else None
    return length if length is not None and length <= MAX_DURATION else None
