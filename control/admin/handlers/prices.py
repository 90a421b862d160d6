"""What tokens cost, from when on."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin import schemas
from llmops.control.admin.money import to_dollars, to_micros
from llmops.store import prices as rows
from llmops.store.audit import AuditContext


async def set_(connection: AsyncConnection, by: AuditContext, asked: schemas.PriceCreate) -> schemas.PriceRead:
    cached = asked.input if asked.cached is None else asked.cached
    amounts = [to_micros(amount) for amount in (asked.input, cached, asked.output)]
    price = rows.Price(asked.model, asked.begins or by.at, *amounts)
    await rows.set_price(connection, price, by)
    return _told(price, await rows.prices_at(connection, by.at))


async def list_(
    connection: AsyncConnection, by: AuditContext, asked: schemas.PriceListQuery
) -> tuple[schemas.PriceRead, ...]:
    in_force = await rows.prices_at(connection, asked.at or by.at)
    found = [_told(price, in_force) for price in await rows.list_prices(connection, asked.model)]
    return tuple(price for price in found if price.in_force or not asked.at)


def _told(price: rows.Price, in_force: dict[str, rows.Price]) -> schemas.PriceRead:
    return schemas.PriceRead(
        id=price.id,
        model=price.model,
        begins=price.valid_from,
        input=to_dollars(price.input_micros),
        cached=to_dollars(price.cached_micros),
        output=to_dollars(price.output_micros),
        in_force=in_force.get(price.model) == price,
    )
