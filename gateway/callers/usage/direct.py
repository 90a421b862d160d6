"""Events in the ledger's own tables. The only file of this room that knows what a store is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.errors import ResourceError
from llmops.gateway.callers.usage.base import UsageSink
from llmops.gateway.messages import UsageEvent
from llmops.store.database import Store
from llmops.store.open import open_store
from llmops.store.prices import Price, list_prices
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
        self._url = url
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        # what the last transaction left, for who asks next
        self._marks: dict[str, int] = {}

    async def write(self, events: Sequence[UsageEvent]) -> None:
        async def written(store: Store) -> dict[str, int]:
            async with store.write() as connection:
                await insert(connection, events)
                return {one: await next_seq(connection, one) for one in {event.gateway_id for event in events}}

        self._marks |= await self._ask(written)

    async def arrived(self, gateway_id: str) -> int:
        if gateway_id in self._marks:
            return self._marks.pop(gateway_id)

        async def read(store: Store) -> int:
            async with store.read() as connection:
                return await next_seq(connection, gateway_id)

        return await self._ask(read)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    async def _ask(self, work: Callable[[Store], Awaitable[Answer]]) -> Answer:
        try:
            return await asyncio.wait_for(self._opened(work), PATIENCE_SECONDS)
        except SQLAlchemyError as error:
            # its own text has the values
            raise ResourceError(f"The store failed ({type(error).__name__}).") from error
        except asyncio.TimeoutError as error:
            raise ResourceError(f"The store did not answer within {PATIENCE_SECONDS:g} s.") from error

    async def _opened(self, work: Callable[[Store], Awaitable[Answer]]) -> Answer:
        """Opened when it is needed first: a worker starts although its store is away."""
        async with self._opening:
            if self._store is None:
                self._store = await open_store(self._url, pool_size=2)
        return await work(self._store)


async def insert(connection: AsyncConnection, events: Sequence[UsageEvent]) -> int:
    """Those that are not there yet, with the price of their time where they have none; how many were new."""
    unpriced = {event.model for event in events if event.price_id is None}
    prices = {model: await list_prices(connection, model) for model in sorted(unpriced)}
    return await insert_usage(connection, [_record(_priced(event, prices)) for event in events])


def _priced(event: UsageEvent, prices: dict[str, Sequence[Price]]) -> UsageEvent:
    if event.price_id is not None:
        return event
    price = max(
        (one for one in prices[event.model] if one.valid_from <= event.at), key=lambda one: one.valid_from, default=None
    )
    if price is None:
        return event
    cached = min(event.cached_tokens, event.input_tokens)
    cost = price.cost_micros(event.input_tokens, cached, event.output_tokens)
    return event._replace(cost_micros=cost, price_id=price.id)


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
