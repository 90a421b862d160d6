"""Prices of models, and the cost of requests in whole micro-dollars, rounded once per request."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import InputError
from llmops.store.audit import AuditContext, record_action
from llmops.store.columns import DAMAGED, insert
from llmops.store.damaged_rows import read_undamaged
from llmops.store.tables import prices

MILLION = 1_000_000
MAX_PRICE_MICROS = 1_000_000 * MILLION
#: Time before its date from which a price is not replaced: gateways read prices every 30 s.
FINAL_BEFORE = timedelta(minutes=1)


@dataclass(frozen=True)
class Price:
    """A price in micro-dollars per million tokens.

    The price is valid from `valid_from` until the model's next price. `cached_micros` applies to
    prompt tokens that the engine found in its cache.
    """

    model: str
    valid_from: datetime
    input_micros: int
    cached_micros: int
    output_micros: int

    def __post_init__(self) -> None:
        # SQLite stores values of any type
        if not isinstance(self.model, str) or not 0 < len(self.model) <= 255:
            raise InputError("A model's name has 1 to 255 characters; give another name.")
        for micros in (self.input_micros, self.cached_micros, self.output_micros):
            if not 0 <= micros <= MAX_PRICE_MICROS:
                raise InputError(
                    f"A price is $0 to ${MAX_PRICE_MICROS // MILLION:,} per million tokens; give one in this range."
                )

    @cached_property
    def id(self) -> str:
        """Return the price's id, which bills show."""
        return f"{self.model}@{self.valid_from.astimezone(UTC).replace(tzinfo=None).isoformat()}Z"

    @cached_property
    def tariff(self) -> Callable[[int, int, int], int]:
        """Return a function that computes the cost of a request in micro-dollars, rounded half up.

        Its arguments are the input tokens, the cached tokens among them, and the output tokens.
        """
        input_micros, output_micros = self.input_micros, self.output_micros
        saved, half = self.input_micros - self.cached_micros, MILLION // 2

        def cost(prompt: int, cached: int, answer: int) -> int:
            if cached > prompt:
                cached = prompt
            return (prompt * input_micros - cached * saved + answer * output_micros + half) // MILLION

        return cost


async def set_price(connection: AsyncConnection, price: Price, by: AuditContext) -> None:
    """Set a price. Replace a price of the same model and date that is not yet in force.

    Raises:
        InputError: The date is in the past, and usage since then has been billed; gateways may
            have read the price that would be replaced; or cached tokens cost more than others, so
            that no budget could reserve a request's cost.
    """
    if price.cached_micros > price.input_micros:
        raise InputError(
            "Cached prompt tokens cannot cost more than other prompt tokens, by whose price budgets reserve money; "
            "give a lower price for them."
        )
    if price.valid_from < by.at:
        raise InputError(
            f"A price cannot begin in the past ({price.valid_from:%Y-%m-%d %H:%M:%S} UTC), as past usage is billed; "
            "give a later time."
        )
    values = asdict(price)
    money = {name: values[name] for name in ("input_micros", "cached_micros", "output_micros")}
    statement = insert(connection, prices).values(values)
    can_replace = prices.c.valid_from >= by.at + FINAL_BEFORE
    statement = statement.on_conflict_do_update(index_elements=["model", "valid_from"], set_=money, where=can_replace)
    if not (await connection.execute(statement)).rowcount:
        raise InputError(
            f"The price of {price.valid_from:%Y-%m-%d %H:%M:%S} UTC cannot be replaced in the last minute before it "
            "begins, as gateways may have read it; give a later time."
        )
    await record_action(connection, by, "price.set", price.id, detail=money)


def price_in_force(known: Sequence[Price], at: datetime) -> Price | None:
    """Return the price in force at `at`, or None.

    Args:
        known: Prices of one model, the oldest first.
        at: The time of the request.
    """
    for price in reversed(known):
        if price.valid_from <= at:
            return price
    return None


async def prices_at(connection: AsyncConnection, at: datetime) -> dict[str, Price]:
    """Return the prices in force at `at`, by model."""
    found, _ = await prices_by_model(connection)
    in_force = {model: price_in_force(known, at) for model, known in found.items()}
    return {model: price for model, price in in_force.items() if price is not None}


async def prices_by_model(connection: AsyncConnection) -> tuple[dict[str, Sequence[Price]], list[str]]:
    """Return the prices of each model, the oldest first, and the models with a damaged price."""
    found: dict[str, Sequence[Price]] = {}
    damaged: list[str] = []
    with suppress(*DAMAGED):
        for model, known in groupby(await connection.run_sync(read_prices, None), attrgetter("model")):
            found[model] = list(known)
        return found, damaged
    for model in (await connection.execute(select(prices.c.model).distinct())).scalars().all():
        try:
            found[model] = await connection.run_sync(read_prices, model)
        except DAMAGED:
            damaged.append(str(model))
    return found, damaged


async def list_prices(connection: AsyncConnection, model: str | None = None) -> Sequence[Price]:
    """Return all past, present and future prices by model, the oldest first.

    A price with a damaged value is left out and logged with its model.
    """
    return await read_undamaged(connection, _select(model), _price, "price of", prices.c.model)


def read_prices(connection: Connection, model: str | None) -> Sequence[Price]:
    """Return the prices as `list_prices` does, but raise one of DAMAGED for a damaged price."""
    return [_price(row) for row in connection.execute(_select(model)).mappings()]


def _select(model: str | None) -> Select[Any]:
    statement = select(prices).order_by(prices.c.model, prices.c.valid_from)
    if model is not None:
        statement = statement.where(prices.c.model == model)
    return statement


def _price(row: RowMapping) -> Price:
    return Price(**row)
