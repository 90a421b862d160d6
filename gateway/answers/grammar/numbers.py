"""Numbers within bounds, digit by digit."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction

from llmops.gateway.answers.grammar.errors import NotEnforceableError
from llmops.gateway.answers.grammar.language import (
    EMPTY,
    NOTHING,
    Language,
    all_of,
    any_of,
    cat,
    char,
    literal,
    multiples,
    optional,
    repeat,
    words,
)

# Up to 15 digits a number is a double of its own; behind the point a few more than the bounds have
_DIGITS, _FRACTION = 15, 6
# so many multiples at most are written out, and so large a step is counted
_WRITTEN_OUT, _LARGEST_STEP = 1000, 1000
_DIGIT = char("0-9")
_POINT = literal(".")
_NATURAL = any_of((literal("0"), cat(char("1-9"), repeat(_DIGIT, 0, _DIGITS - 1))))
_INTEGER = cat(optional(literal("-")), _NATURAL)
_EXPONENT = cat(char("eE"), optional(char("+-")), repeat(_DIGIT, 1, 2))
# Without bounds digits are not counted: an engine keeps a mask of the vocabulary for each state
_WHOLE = any_of((literal("0"), cat(optional(literal("-")), char("1-9"), repeat(_DIGIT))))
_ANY_NATURAL = any_of((literal("0"), cat(char("1-9"), repeat(_DIGIT))))
_NUMBER = cat(optional(literal("-")), _ANY_NATURAL, optional(cat(_POINT, repeat(_DIGIT, 1))), optional(_EXPONENT))


@dataclass(frozen=True)
class Bounds:
    """None: no bound. `open_low`, `open_high`: the bound itself is out."""

    low: Decimal | None = None
    high: Decimal | None = None
    open_low: bool = False
    open_high: bool = False

    def within(self, value: Decimal) -> bool:
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        return above and (self.high is None or (value < self.high if self.open_high else value <= self.high))

    def negated(self) -> Bounds:
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Bounds(low, high, self.open_high, self.open_low)


def integer(bounds: Bounds, step: Decimal | None = None) -> Language:
    """Whole numbers within `bounds`, multiples of `step`. Raises NotEnforceableError for other than small steps."""
    whole = _signed(bounds, fraction=False) if bounds != Bounds() else _WHOLE
    if step is None or (step < 1 and 1 % Fraction(step) == 0):
        return whole
    if step == step.to_integral_value() and step <= _LARGEST_STEP:
        return all_of((whole, cat(optional(literal("-")), multiples(int(step)))))
    return words(text for text in _multiples(bounds, step) if "." not in text)


def number(bounds: Bounds, step: Decimal | None = None) -> Language:
    """As `integer`, with a fraction; with an exponent only where there are no bounds."""
    if step is None:
        return _NUMBER if bounds == Bounds() else _signed(bounds, fraction=True)
    if step == step.to_integral_value():
        return integer(bounds, step)
    places = -int(step.normalize().as_tuple().exponent)
    if step == Decimal(1).scaleb(-places):
        short = cat(_INTEGER, optional(cat(_POINT, repeat(_DIGIT, 1, places))))
        return all_of((_signed(bounds, fraction=True), short))
    return words(_multiples(bounds, step))


def _multiples(bounds: Bounds, step: Decimal) -> list[str]:
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


def _signed(bounds: Bounds, fraction: bool) -> Language:
    parts = []
    if bounds.high is None or bounds.high >= 0:
        parts.append(_unsigned(bounds, fraction))
    if bounds.low is None or bounds.low < 0:
        negative = bounds.negated()
        above_zero = Bounds(Decimal(0), negative.high, True, negative.open_high)
        limits = negative if negative.low is not None and negative.low > 0 else above_zero
        parts.append(cat(literal("-"), _unsigned(limits, fraction)))
    return any_of(parts)


def _unsigned(bounds: Bounds, fraction: bool) -> Language:
    """Numbers from 0 on within bounds, without a sign."""
    low = Decimal(0) if bounds.low is None or bounds.low < 0 else bounds.low
    open_low = bounds.open_low and low == bounds.low
    above = _from(low, open_low, _room(low, open_low) if fraction else 0)
    if bounds.high is None:
        return above
    high, open_high = bounds.high, bounds.open_high
    if low > high:
        return NOTHING
    return all_of((above, _up_to(high, open_high, _room(high, open_high) if fraction else 0)))


def _room(bound: Decimal, exclusive: bool) -> int:
    """Digits behind the point. Not so many that a double would round to a bound that is itself out."""
    whole, behind = _parts(bound)
    room = min(_FRACTION, max(_DIGITS - len(whole), 0)) if exclusive else _FRACTION
    return max(room, len(behind) + 1)


def _parts(value: Decimal) -> tuple[str, str]:
    """The digits before and behind the point of an unsigned number, without zeros that say nothing."""
    whole, _, behind = f"{abs(value):f}".partition(".")
    return whole, behind.rstrip("0")


def _fraction(digits: Language) -> Language:
    return cat(_POINT, digits)


def _from(low: Decimal, exclusive: bool, room: int) -> Language:
    """Unsigned numbers from `low` on."""
    whole, behind = _parts(low)
    if behind and not room:
        return _from(low.to_integral_value(ROUND_CEILING), False, room)
    tail = optional(_fraction(repeat(_DIGIT, 1, room))) if room else EMPTY
    longer = cat(char("1-9"), repeat(_DIGIT, len(whole), max(_DIGITS - 1, len(whole))), tail)
    greater = cat(_digits_beside(whole, up=True), tail)
    equal = [] if exclusive or behind else [literal(whole)]
    if room:
        beyond = cat(_digits_beside(behind, up=True, exact=False), repeat(_DIGIT, 0, room))
        zeros = repeat(_DIGIT, 0 if behind else 1, room)
        some = cat(repeat(literal("0")), char("1-9"), repeat(_DIGIT))
        rest = all_of((zeros, some)) if exclusive else zeros
        equal.append(cat(literal(whole), _fraction(any_of([beyond, cat(literal(behind), rest)]))))
    return any_of([longer, greater, *equal])


def _up_to(high: Decimal, exclusive: bool, room: int) -> Language:
    """Unsigned numbers up to `high`."""
    whole, behind = _parts(high)
    if behind and not room:
        return _up_to(high.to_integral_value(ROUND_FLOOR), False, room)
    tail = optional(_fraction(repeat(_DIGIT, 1, room))) if room else EMPTY
    shorter = NOTHING
    if len(whole) > 1:
        shorter = any_of((literal("0"), cat(char("1-9"), repeat(_DIGIT, 0, len(whole) - 2))))
    smaller = cat(any_of((shorter, _digits_beside(whole, up=False))), tail)
    equal = [] if exclusive and not behind else [literal(whole)]
    if room:
        below = [cat(_digits_beside(behind, up=False, exact=False), repeat(_DIGIT, 0, room))]
        below += [literal(behind[:size]) for size in range(1, len(behind))]
        zeros = NOTHING if exclusive else cat(literal(behind), repeat(literal("0"), 0 if behind else 1, room))
        equal.append(cat(literal(whole), _fraction(any_of([*below, zeros]))))
    return any_of([smaller, *equal])


def _digits_beside(digits: str, up: bool, exact: bool = True) -> Language:
    """Digits that differ from `digits` first in one that is greater (`up`) or smaller; `exact`: as many of them, and
    without a zero in front."""
    found = NOTHING
    for at in reversed(range(len(digits))):
        least = "1" if exact and at == 0 and len(digits) > 1 else "0"
        first, last = (chr(ord(digits[at]) + 1), "9") if up else (least, chr(ord(digits[at]) - 1))
        rest = len(digits) - at - 1 if exact else 0
        beside = cat(char(f"{first}-{last}"), repeat(_DIGIT, rest, rest)) if first <= last else NOTHING
        found = any_of((beside, cat(literal(digits[at]), found)))
    return found
