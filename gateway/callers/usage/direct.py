"""Events in the ledger's own tables. The only file of this room that knows what a store is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import lru_cache
from typing import TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import ResourceError
from llmops.gateway.callers.usage.base import UsageSink
from llmops.gateway.callers.usage.cost import micros
from llmops.gateway.messages import Usage, UsageEvent
from llmops.store.open import LazyStore
from llmops.store.prices import Price, in_force, list_prices
from llmops.store.tables import usage_records
from llmops.store.usage import UsageRecord, insert_usage, next_seq

Answer = TypeVar("Answer")

# whoever asks without a key; one user, so that nobody can make rows by sending ever new ones
ANONYMOUS = str(UUID(int=0))
# a store that has not answered by then counts as away
PATIENCE_SECONDS = 30.0
_LENGTHS = {column.name: getattr(column.type, "length", None) for column in usage_records.columns}
_HIGHEST = 2**31 - 1


class Direct(UsageSink):
    """One transaction for each batch, in the store at `url`."""

    def __init__(self, url: str) -> None:
        self._store = LazyStore(url, pool_size=2)
        # what the last transaction left, for who asks next
        self._marks: dict[str, int] = {}

    async def write(self, events: Sequence[UsageEvent]) -> None:
        self._marks |= await _answered(self._write(events))

    async def arrived(self, gateway_id: str) -> int:
        if gateway_id in self._marks:
            return self._marks.pop(gateway_id)
        return await _answered(self._mark(gateway_id))

    async def close(self) -> None:
        await self._store.close()

    async def _write(self, events: Sequence[UsageEvent]) -> dict[str, int]:
        async with self._store.write() as connection:
            await insert(connection, events)
            return {one: await next_seq(connection, one) for one in {event.gateway_id for event in events}}

    async def _mark(self, gateway_id: str) -> int:
        async with self._store.read() as connection:
            return await next_seq(connection, gateway_id)


async def _answered(work: Awaitable[Answer]) -> Answer:
    """Raises LlmopsError for a store that is away, or too slow."""
    try:
        return await asyncio.wait_for(work, PATIENCE_SECONDS)
    except SQLAlchemyError as error:
        # its own text has the values
        raise ResourceError(f"The store failed ({type(error).__name__}).") from error
    except asyncio.TimeoutError as error:
        raise ResourceError(f"The store did not answer within {PATIENCE_SECONDS:g} s.") from error


async def insert(connection: AsyncConnection, events: Sequence[UsageEvent]) -> int:
    """Those that are not there yet, with the price of their time where they have none; how many were new."""
    unpriced = {event.model for event in events if event.price_id is None}
    prices = {model: await list_prices(connection, model) for model in sorted(unpriced)}
    return await insert_usage(connection, [_record(_priced(event, prices)) for event in events])


def _priced(event: UsageEvent, prices: dict[str, Sequence[Price]]) -> UsageEvent:
    if event.price_id is not None:
        return event
    price = in_force(prices[event.model], event.at)
    if price is None:
        return event
    used = Usage(event.input_tokens, event.output_tokens, cached_tokens=event.cached_tokens)
    return event._replace(cost_micros=micros(price, used), price_id=price.id)


def _record(event: UsageEvent) -> UsageRecord:
    """A row that the tables take, whatever the event says: one that they refused would stop all behind it."""
    fields = event._asdict()
    tenant, user, fields["created_at"] = fields.pop("tenant_id"), fields.pop("user_id"), fields.pop("at")
    fields["key_id"] = event.key_id or None
    for name, value in fields.items():
        if isinstance(value, str):
            length = _LENGTHS[name]
            if not value.isascii() or "\0" in value or len(value) > (length or len(value)):
                # a database without an encoding counts bytes
                fields[name] = value.replace("\0", "").encode("utf-8", "replace")[:length].decode("utf-8", "ignore")
        elif isinstance(value, int) and value > _HIGHEST and name not in ("seq", "cost_micros"):
            fields[name] = _HIGHEST
    return UsageRecord(**fields, user_id=_user(tenant, user))


@lru_cache(maxsize=4096)
def _user(tenant: str, user: str) -> str:
    """The store's own id of the user; for one that another system named an id that is always the same."""
    if not tenant:
        return ANONYMOUS
    try:
        return str(UUID(user))
    except ValueError:
        return str(uuid5(NAMESPACE_URL, f"llmops:{tenant}/{user}"))
