"""Languages of JSON numbers within bounds, built digit by digit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction

from llmops.gateway.generation.structured.grammar.compile_limits import NotEnforceableError
from llmops.gateway.generation.structured.grammar.regular_language import (
    EMPTY_SET,
    EMPTY_TEXT,
    RegularLanguage,
    all_of,
    any_of,
    any_word,
    char,
    concat,
    literal,
    multiples,
    optional,
    repeat,
)

#: Maximum digits before the decimal point: with up to 15 digits, different numbers are different
#: doubles.
_MAX_DIGITS = 15

#: Maximum digits after the decimal point, unless the bounds have more.
_FRACTION_DIGITS = 6

#: Maximum number of multiples of a step that are written out one by one, which bounds the grammar.
_MAX_WRITTEN_MULTIPLES = 1000
#: Largest integer step whose multiples are recognized by counting remainders, with a state for each
#: remainder.
_MAX_COUNTED_STEP = 1000

_DIGIT = char("0-9")
_POINT = literal(".")
_MINUS = literal("-")
_INTEGER = concat(optional(_MINUS), any_of((literal("0"), concat(char("1-9"), repeat(_DIGIT, 0, _MAX_DIGITS - 1)))))
_EXPONENT = concat(char("eE"), optional(char("+-")), repeat(_DIGIT, 1, 2))
# Without bounds, digits are not counted, because an engine keeps a vocabulary mask for each state.
_ANY_NATURAL = any_of((literal("0"), concat(char("1-9"), repeat(_DIGIT))))
_ANY_INTEGER = any_of((literal("0"), concat(optional(_MINUS), char("1-9"), repeat(_DIGIT))))
_ANY_NUMBER = concat(optional(_MINUS), _ANY_NATURAL, optional(concat(_POINT, repeat(_DIGIT, 1))), optional(_EXPONENT))


@dataclass(frozen=True)
class NumberRange:
    """The bounds of a number.

    Attributes:
        low: The lower bound; None without a lower bound.
        high: The upper bound; None without an upper bound.
        open_low: True if the lower bound itself is excluded.
        open_high: True if the upper bound itself is excluded.
    """

    low: Decimal | None = None
    high: Decimal | None = None
    open_low: bool = False
    open_high: bool = False

    def within(self, value: Decimal) -> bool:
        """Return True if `value` is within the bounds."""
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        return above and (self.high is None or (value < self.high if self.open_high else value <= self.high))


def integer_language(bounds: NumberRange, step: Decimal | None = None) -> RegularLanguage:
    """Return the language of the integers within `bounds` that are multiples of `step`.

    Raises:
        NotEnforceableError: The step has too many multiples.
    """
    whole = _signed(bounds, with_fraction=False) if bounds != NumberRange() else _ANY_INTEGER
    if step is None or (step < 1 and 1 % Fraction(step) == 0):
        return whole
    if step == step.to_integral_value() and step <= _MAX_COUNTED_STEP:
        return all_of((whole, concat(optional(_MINUS), multiples(int(step)))))
    return any_word(text for text in _written_multiples(bounds, step) if "." not in text)


def number_language(bounds: NumberRange, step: Decimal | None = None) -> RegularLanguage:
    """Return the language of the numbers within `bounds` that are multiples of `step`.

    Exponents are allowed only without bounds.

    Raises:
        NotEnforceableError: The step has too many multiples.
    """
    if step is None:
        return _ANY_NUMBER if bounds == NumberRange() else _signed(bounds, with_fraction=True)
    if step == step.to_integral_value():
        return integer_language(bounds, step)
    places = -int(step.normalize().as_tuple().exponent)
    if step == Decimal(1).scaleb(-places):
        short = concat(_INTEGER, optional(concat(_POINT, repeat(_DIGIT, 1, places))))
        return all_of((_signed(bounds, with_fraction=True), short))
    return any_word(_written_multiples(bounds, step))


def _written_multiples(bounds: NumberRange, step: Decimal) -> list[str]:
    if bounds.low is None or bounds.high is None or (bounds.high - bounds.low) / step > _MAX_WRITTEN_MULTIPLES:
        raise NotEnforceableError(
            f"'multipleOf' {step} needs bounds with at most {_MAX_WRITTEN_MULTIPLES} multiples; set them"
        )
    first = (bounds.low / step).to_integral_value(ROUND_CEILING)
    last = (bounds.high / step).to_integral_value(ROUND_FLOOR)
    values = (step * (first + count) for count in range(int(last - first) + 1))
    return [_plain(value) for value in values if bounds.within(value)]


def _plain(value: Decimal) -> str:
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _signed(bounds: NumberRange, with_fraction: bool) -> RegularLanguage:
    """Return the language of the numbers within `bounds`, with a minus sign if they are negative.

    If `with_fraction` is True, the numbers may have digits after the decimal point.
    """
    places = _fraction_digits(bounds) if with_fraction else 0
    low, high = bounds.low, bounds.high
    if low is not None:
        exact = Fraction(low) * 10**places
        low = math.floor(exact) + 1 if bounds.open_low else math.ceil(exact)
    if high is not None:
        exact = Fraction(high) * 10**places
        high = math.ceil(exact) - 1 if bounds.open_high else math.floor(exact)
    parts = []
    if high is None or high >= 0:
        parts.append(_unsigned(max(low or 0, 0), high, places))
    if low is None or low < 0:
        # Write -0 as 0.
        parts.append(concat(_MINUS, _unsigned(max(-(high or 0), 1), None if low is None else -low, places)))
    return any_of(parts)


def _fraction_digits(bounds: NumberRange) -> int:
    """Return the maximum number of digits after the decimal point.

    The maximum is more than the bounds' own digits, and small enough that no value rounds to an
    excluded bound.
    """
    places, least = _FRACTION_DIGITS, 0
    for bound, is_open in ((bounds.low, bounds.open_low), (bounds.high, bounds.open_high)):
        if bound is not None:
            whole, _, behind = f"{abs(bound):f}".partition(".")
            least = max(least, len(behind.rstrip("0")) + 1)
            places = min(places, max(_MAX_DIGITS - len(whole), 0)) if is_open else places
    return max(places, least)


def _unsigned(low: int, high: int | None, places: int) -> RegularLanguage:
    """Return the language of the numbers from `low` to `high` without a sign.

    Args:
        low: The smallest number, in units of 10 ** -places.
        high: The largest number, in units of 10 ** -places; None without an upper bound.
        places: The maximum number of digits after the decimal point.
    """
    least = len(str(low // 10**places))
    limit = 10 ** (max(_MAX_DIGITS, least + 1) + places) - 1
    high = limit if high is None else min(high, limit)
    parts, complete = [], []
    for count in range(least, len(str(high // 10**places)) + 1):
        first = 10 ** (count - 1 + places)
        if count > 1 and low <= first and high >= 10 * first - 1:
            complete.append(count)
        else:
            parts.append(_digits(count, low, high, places, first=int(count > 1)))
    if complete:
        digits = concat(char("1-9"), repeat(_DIGIT, complete[0] - 1, complete[-1] - 1))
        parts.append(concat(digits, _any_fraction(places)))
    return any_of(parts)


def _digits(count: int, low: int, high: int, places: int, first: int = 0) -> RegularLanguage:
    """Return the language of the numbers from `low` to `high` with `count` integer digits.

    Args:
        count: The number of digits before the decimal point.
        low: The smallest number, in units of 10 ** -places.
        high: The largest number, in units of 10 ** -places.
        places: The maximum number of digits after the decimal point.
        first: The smallest first digit.
    """
    if first == 0 and low <= 0 and high >= 10 ** (count + places) - 1:
        return concat(repeat(_DIGIT, count, count), _any_fraction(places))
    if count == 0:
        fraction = concat(_POINT, _fraction(low, high, places)) if places else EMPTY_SET
        return optional(fraction) if low <= 0 <= high else fraction
    unit, parts = 10 ** (count - 1 + places), []
    for digit in range(first, 10):
        if low < (digit + 1) * unit and high >= digit * unit:
            rest = _digits(count - 1, low - digit * unit, high - digit * unit, places)
            parts.append(concat(literal(str(digit)), rest))
    return any_of(parts)


def _any_fraction(places: int) -> RegularLanguage:
    return optional(concat(_POINT, repeat(_DIGIT, 1, places))) if places else EMPTY_TEXT


def _fraction(low: int, high: int, places: int) -> RegularLanguage:
    """Return the language of 1 to `places` digits after the point, from `low` to `high`.

    `low` and `high` are in units of 10 ** -places.
    """
    if low <= 0 and high >= 10**places - 1:
        return repeat(_DIGIT, 1, places)
    unit, parts = 10 ** (places - 1), []
    for digit in range(10):
        start = digit * unit
        if low < start + unit and high >= start:
            rest = _fraction(low - start, high - start, places - 1) if places > 1 else EMPTY_SET
            parts.append(concat(literal(str(digit)), optional(rest) if low <= start <= high else rest))
    return any_of(parts)
