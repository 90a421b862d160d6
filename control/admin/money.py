"""US dollars as JSON has them, and the whole micro-dollars that are kept."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import Field, PlainSerializer

from llmops.money import MICROS_PER_USD

# exact as it is read from JSON; as a number it is written
Dollars = Annotated[
    Decimal,
    Field(ge=0, max_digits=30, decimal_places=6, description="US dollars, with at most six decimals."),
    PlainSerializer(float, return_type=float, when_used="json"),
]


def to_micros(dollars: Decimal) -> int:
    return int(dollars * MICROS_PER_USD)


def to_dollars(micros: int) -> Decimal:
    return Decimal(micros) / MICROS_PER_USD
