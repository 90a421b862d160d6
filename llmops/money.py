"""How money is told. It is kept in whole micro-dollars."""

from __future__ import annotations

MICROS_PER_USD = 1_000_000


def format_usd(micros: int) -> str:
    """`$0.000019`, `$50.00`: exact, with at least two decimals."""
    whole, rest = divmod(micros, MICROS_PER_USD)
    return f"${whole:,}.{f'{rest:06}'.rstrip('0'):0<2}"
