"""What tokens cost, from when on."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import wire
from llmops.control.admin.money import dollars_of, micros_of
from llmops.store import prices as rows
from llmops.store.audit import By


async def set_(connection: AsyncConnection, by: By, asked: wire.NewPrice) -> wire.Price:
    cached = asked.input if asked.cached is None else asked.cached
    amounts = [micros_of(amount) for amount in (asked.input, cached, asked.output)]
    price = rows.Price(asked.model, asked.begins or by.at, *amounts)
    await rows.set_price(connection, price, by)
    return _told(price, await rows.prices_at(connection, by.at))


async def list_(connection: AsyncConnection, by: By, asked: wire.PricesWanted) -> tuple[wire.Price, ...]:
    in_force = await rows.prices_at(connection, asked.at or by.at)
    found = [_told(price, in_force) for price in await rows.list_prices(connection, asked.model)]
    return tuple(price for price in found if price.in_force or not asked.at)


def _told(price: rows.Price, in_force: dict[str, rows.Price]) -> wire.Price:
    return wire.Price(
        id=price.id,
        model=price.model,
        begins=price.valid_from,
        input=dollars_of(price.input_micros),
        cached=dollars_of(price.cached_micros),
        output=dollars_of(price.output_micros),
        in_force=in_force.get(price.model) == price,
    )
