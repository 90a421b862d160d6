"""Events in the ledger's own tables. The only file of this room that knows what a store is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from llmops.clocks import within
from llmops.errors import ResourceError
from llmops.gateway.callers.usage.base import UsageSink
from llmops.gateway.callers.usage.cost import micros
from llmops.gateway.messages import Usage, UsageEvent
from llmops.store.open import LazyStore
from llmops.store.prices import Price, in_force, prices_of
from llmops.store.tables import usage_records
from llmops.store.usage import next_seq
from llmops.store.usage_writes import UsageRecord, Written, write_usage
from llmops.tuples import maker

Answer = TypeVar("Answer")

# whoever asks without a key; one user, so that nobody can make rows by sending ever new ones
ANONYMOUS = str(UUID(int=0))
# a store that has not answered by then counts as away
PATIENCE_SECONDS = 30.0
_LENGTHS = {column.name: getattr(column.type, "length", None) or 0 for column in usage_records.columns}
_HIGHEST = 2**31 - 1


class Direct(UsageSink):
    """One transaction for each batch, in the store at `url`."""

    def __init__(self, url: str) -> None:
        self._store = LazyStore(url, pool_size=2)
        # what the last transaction left, for who asks next
        self._marks: dict[str, int] = {}

    async def write(self, events: Sequence[UsageEvent]) -> None:
        written = await _answered(self._store.transact(partial(write_events, events=events)))
        self._marks |= written.marks

    async def arrived(self, gateway_id: str) -> int:
        if gateway_id in self._marks:
            return self._marks.pop(gateway_id)
        return await _answered(self._mark(gateway_id))

    async def close(self) -> None:
        await self._store.close()

    async def _mark(self, gateway_id: str) -> int:
        async with self._store.read() as connection:
            return await next_seq(connection, gateway_id)


async def _answered(work: Awaitable[Answer]) -> Answer:
    """Raises LlmopsError for a store that is away, or too slow."""
    try:
        return await within(PATIENCE_SECONDS, work)
    except SQLAlchemyError as error:
        # its own text has the values
        raise ResourceError(f"The store failed ({type(error).__name__}).") from error
    except asyncio.TimeoutError as error:
        raise ResourceError(f"The store did not answer within {PATIENCE_SECONDS:g} s.") from error


def write_events(connection: Connection, events: Sequence[UsageEvent]) -> Written:
    """Those that are not there yet, with the price of their time where they have none."""
    unpriced = {event.model for event in events if event.price_id is None}
    prices = {model: prices_of(connection, model) for model in sorted(unpriced)}
    return write_usage(connection, [_record(_priced(event, prices)) for event in events])


def _priced(event: UsageEvent, prices: dict[str, Sequence[Price]]) -> UsageEvent:
    if event.price_id is not None:
        return event
    price = in_force(prices[event.model], event.at)
    if price is None:
        return event
    used = Usage(event.input_tokens, event.output_tokens, cached_tokens=event.cached_tokens)
    return event._replace(cost_micros=micros(price, used), price_id=price.id)


_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "ttft_ms", "latency_ms")
_TEXTS = ("tenant_id", "user_id", "model", "key_id", "price_id", "version", "replica", "finish_reason", "priority")
_counts_of, _texts_of = (itemgetter(*map(UsageEvent._fields.index, names)) for names in (_COUNTS, _TEXTS))
_record_of = maker(UsageRecord)


def _record(event: UsageEvent) -> UsageRecord:
    """A row that the tables take, whatever the event says: one that they refused would stop all behind it."""
    counts = _counts_of(event)
    if max(filter(None, counts), default=0) > _HIGHEST:
        counts = tuple(count and min(count, _HIGHEST) for count in counts)
    taken, given, cached, reasoning, ttft, latency = counts
    user, model, key, price, version, replica, finish, priority = _fitting(_texts_of(event))
    request = _text("request_id", event.request_id) or ""
    cost, status, moves = event.cost_micros, event.status, event.migrations
    return _record_of(
        (
            *event[:4], request, user, model, taken, given, cost, cached, reasoning, key, price, version, replica,
            status, finish, ttft, latency, priority, moves,
        )
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _fitting(texts: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """What many events have in common."""
    tenant, user, *others = texts
    model, key, *rest = (_text(name, text) for name, text in zip(_TEXTS[2:], others, strict=True))
    return _user(tenant or "", user or ""), model or "", key or None, *rest


def _text(name: str, value: str | None) -> str | None:
    """As much of it as its column takes."""
    if value is None or (value.isascii() and "\0" not in value and len(value) <= _LENGTHS[name]):
        return value
    # a database without an encoding counts bytes
    return value.replace("\0", "").encode("utf-8", "replace")[: _LENGTHS[name]].decode("utf-8", "ignore")


def _user(tenant: str, user: str) -> str:
    """The store's own id of the user; for one that another system named an id that is always the same."""
    if not tenant:
        return ANONYMOUS
    try:
        return str(UUID(user))
    except ValueError:
        return str(uuid5(NAMESPACE_URL, f"llmops:{tenant}/{user}"))
