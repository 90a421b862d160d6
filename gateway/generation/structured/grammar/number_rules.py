"""Numbers within bounds, digit by digit."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction

from llmops.gateway.generation.structured.grammar.errors import NotEnforceableError
from llmops.gateway.generation.structured.grammar.regular_language import (
    EMPTY,
    NOTHING,
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

# Up to 15 digits a number is a double of its own; behind the point a few more than the bounds have
_DIGITS, _FRACTION = 15, 6
# so many multiples at most are written out, and so large a step is counted
_WRITTEN_OUT, _LARGEST_STEP = 1000, 1000
_DIGIT = char("0-9")
_POINT = literal(".")
_NATURAL = any_of((literal("0"), concat(char("1-9"), repeat(_DIGIT, 0, _DIGITS - 1))))
_INTEGER = concat(optional(literal("-")), _NATURAL)
_EXPONENT = concat(char("eE"), optional(char("+-")), repeat(_DIGIT, 1, 2))
# Without bounds digits are not counted: an engine keeps a mask of the vocabulary for each state
_WHOLE = any_of((literal("0"), concat(optional(literal("-")), char("1-9"), repeat(_DIGIT))))
_ANY_NATURAL = any_of((literal("0"), concat(char("1-9"), repeat(_DIGIT))))
_NUMBER = concat(optional(literal("-")), _ANY_NATURAL, optional(concat(_POINT, repeat(_DIGIT, 1))), optional(_EXPONENT))


@dataclass(frozen=True)
class NumberRange:
    """None: no bound. `open_low`, `open_high`: the bound itself is out."""

    low: Decimal | None = None
    high: Decimal | None = None
    open_low: bool = False
    open_high: bool = False

    def within(self, value: Decimal) -> bool:
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        return above and (self.high is None or (value < self.high if self.open_high else value <= self.high))

    def negated(self) -> NumberRange:
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return NumberRange(low, high, self.open_high, self.open_low)


def integer(bounds: NumberRange, step: Decimal | None = None) -> RegularLanguage:
    """Whole numbers within `bounds`, multiples of `step`. Raises NotEnforceableError for other than small steps."""
    whole = _signed(bounds, fraction=False) if bounds != NumberRange() else _WHOLE
    if step is None or (step < 1 and 1 % Fraction(step) == 0):
        return whole
    if step == step.to_integral_value() and step <= _LARGEST_STEP:
        return all_of((whole, concat(optional(literal("-")), multiples(int(step)))))
    return any_word(text for text in _multiples(bounds, step) if "." not in text)


def number(bounds: NumberRange, step: Decimal | None = None) -> RegularLanguage:
    """As `integer`, with a fraction; with an exponent only where there are no bounds."""
    if step is None:
        return _NUMBER if bounds == NumberRange() else _signed(bounds, fraction=True)
    if step == step.to_integral_value():
        return integer(bounds, step)
    places = -int(step.normalize().as_tuple().exponent)
    if step == Decimal(1).scaleb(-places):
        short = concat(_INTEGER, optional(concat(_POINT, repeat(_DIGIT, 1, places))))
        return all_of((_signed(bounds, fraction=True), short))
    return any_word(_multiples(bounds, step))


def _multiples(bounds: NumberRange, step: Decimal) -> list[str]:
    if bounds.low is None or bounds.high is None or (bounds.high - bounds.low) / step > _WRITTEN_OUT:
        raise NotEnforceableError(f"'multipleOf' {step} without bounds that have at most {_WRITTEN_OUT} multiples")
    at = (bounds.low / step).to_integral_value(ROUND_CEILING)
    last = (bounds.high / step).to_integral_value(ROUND_FLOOR)
    values = (step * (at + count) for count in range(int(last - at) + 1))
    return [_plain(value) for value in values if bounds.within(value)]


def _plain(value: Decimal) -> str:
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _signed(bounds: NumberRange, fraction: bool) -> RegularLanguage:
    parts = []
    if bounds.high is None or bounds.high >= 0:
        parts.append(_unsigned(bounds, fraction))
    if bounds.low is None or bounds.low < 0:
        negative = bounds.negated()
        above_zero = NumberRange(Decimal(0), negative.high, True, negative.open_high)
        limits = negative if negative.low is not None and negative.low > 0 else above_zero
        parts.append(concat(literal("-"), _unsigned(limits, fraction)))
    return any_of(parts)


def _unsigned(bounds: NumberRange, fraction: bool) -> RegularLanguage:
    """Numbers from 0 on within bounds, without a sign."""
    low = Decimal(0) if bounds.low is None or bounds.low < 0 else bounds.low
    open_low = bounds.open_low and low == bounds.low
    above = _from(low, open_low, _fraction_digits(low, open_low) if fraction else 0)
    if bounds.high is None:
        return above
    high, open_high = bounds.high, bounds.open_high
    if low > high:
        return NOTHING
    return all_of((above, _up_to(high, open_high, _fraction_digits(high, open_high) if fraction else 0)))


def _fraction_digits(bound: Decimal, exclusive: bool) -> int:
    """Digits behind the point. Not so many that a double would round to a bound that is itself out."""
    whole, behind = _parts(bound)
    room = min(_FRACTION, max(_DIGITS - len(whole), 0)) if exclusive else _FRACTION
    return max(room, len(behind) + 1)


def _parts(value: Decimal) -> tuple[str, str]:
    """The digits before and behind the point of an unsigned number, without zeros that say nothing."""
    whole, _, behind = f"{abs(value):f}".partition(".")
    return whole, behind.rstrip("0")


def _fraction(digits: RegularLanguage) -> RegularLanguage:
    return concat(_POINT, digits)


def _from(low: Decimal, exclusive: bool, room: int) -> RegularLanguage:
    """Unsigned numbers from `low` on."""
    whole, behind = _parts(low)
    if behind and not room:
        return _from(low.to_integral_value(ROUND_CEILING), False, room)
    tail = optional(_fraction(repeat(_DIGIT, 1, room))) if room else EMPTY
    longer = concat(char("1-9"), repeat(_DIGIT, len(whole), max(_DIGITS - 1, len(whole))), tail)
    greater = concat(_digits_beside(whole, up=True), tail)
    equal = [] if exclusive or behind else [literal(whole)]
    if room:
        beyond = concat(_digits_beside(behind, up=True, exact=False), repeat(_DIGIT, 0, room))
        zeros = repeat(_DIGIT, 0 if behind else 1, room)
        some = concat(repeat(literal("0")), char("1-9"), repeat(_DIGIT))
        rest = all_of((zeros, some)) if exclusive else zeros
        equal.append(concat(literal(whole), _fraction(any_of([beyond, concat(literal(behind), rest)]))))
    return any_of([longer, greater, *equal])


def _up_to(high: Decimal, exclusive: bool, room: int) -> RegularLanguage:
    """Unsigned numbers up to `high`."""
    whole, behind = _parts(high)
    if behind and not room:
        return _up_to(high.to_integral_value(ROUND_FLOOR), False, room)
    tail = optional(_fraction(repeat(_DIGIT, 1, room))) if room else EMPTY
    shorter = NOTHING
    if len(whole) > 1:
        shorter = any_of((literal("0"), concat(char("1-9"), repeat(_DIGIT, 0, len(whole) - 2))))
    smaller = concat(any_of((shorter, _digits_beside(whole, up=False))), tail)
    equal = [] if exclusive and not behind else [literal(whole)]
    if room:
        below = [concat(_digits_beside(behind, up=False, exact=False), repeat(_DIGIT, 0, room))]
        below += [literal(behind[:size]) for size in range(1, len(behind))]
        zeros = NOTHING if exclusive else concat(literal(behind), repeat(literal("0"), 0 if behind else 1, room))
        equal.append(concat(literal(whole), _fraction(any_of([*below, zeros]))))
    return any_of([smaller, *equal])


def _digits_beside(digits: str, up: bool, exact: bool = True) -> RegularLanguage:
    """Digits that differ from `digits` first in one that is greater (`up`) or smaller; `exact`: as many of them, and
    without a zero in front."""
    found = NOTHING
    for at in reversed(range(len(digits))):
        least = "1" if exact and at == 0 and len(digits) > 1 else "0"
        first, last = (chr(ord(digits[at]) + 1), "9") if up else (least, chr(ord(digits[at]) - 1))
        rest = len(digits) - at - 1 if exact else 0
        beside = concat(char(f"{first}-{last}"), repeat(_DIGIT, rest, rest)) if first <= last else NOTHING
        found = any_of((beside, concat(literal(digits[at]), found)))
    return found
