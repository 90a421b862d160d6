"""Events in the ledger's own tables. The only file of this room that knows what a store is."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from llmops.clocks import utc_now, wait_with_timeout
from llmops.errors import ResourceError
from llmops.gateway.interfaces import Usage, UsageEvent
from llmops.gateway.usage.billing import micros
from llmops.gateway.usage.event_formats import MAX_COST_MICROS, to_cloud_event
from llmops.gateway.usage.sink import UsageSink
from llmops.store.dead_letters import DeadLetter, add_dead_letters
from llmops.store.factory import LazyStore
from llmops.store.prices import Price, list_prices_async, price_in_force
from llmops.store.tables import tenant_totals, usage_records
from llmops.store.usage_queries import known_events
from llmops.store.usage_writes import (
    MAX_SEQUENCE,
    RecordOwners,
    UsageRecord,
    WriteResult,
    find_record_owners,
    write_usage,
)
from llmops.tuples import namedtuple_factory
from llmops.untrusted_text import escape_unsafe, strip_unsafe

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# whoever asks without a key; one user, so that nobody can make rows by sending ever new ones
ANONYMOUS_USER_ID = str(UUID(int=0))
# a store that has not answered by then counts as away
STORE_TIMEOUT = 30.0
_LENGTHS = {column.name: getattr(column.type, "length", None) or 0 for column in usage_records.columns}
_LENGTHS |= {"tenant_id": getattr(tenant_totals.c.tenant_id.type, "length", None) or 0}
_MAX_INT32 = 2**31 - 1


class LedgerSink(UsageSink):
    """One transaction for each batch, in the store at `url`."""

    def __init__(self, url: str) -> None:
        self._store = LazyStore(url, pool_size=2)
        # what the last transaction wrote, for the question that follows
        self._written: frozenset[str] = frozenset()

    async def write(self, events: Sequence[UsageEvent]) -> None:
        await _within_timeout(self._store.transact(partial(write_events, events=events)))
        self._written = frozenset(event.id for event in events)

    async def confirmed(self, ids: Sequence[str]) -> frozenset[str]:
        wanted = frozenset(ids)
        return wanted if wanted <= self._written else await _within_timeout(self._known(ids))

    async def close(self) -> None:
        await self._store.close()

    async def _known(self, ids: Sequence[str]) -> frozenset[str]:
        async with self._store.read() as connection:
            return await known_events(connection, ids)


async def _within_timeout(work: Awaitable[Answer]) -> Answer:
    """Raises LlmopsError for a store that is away, or too slow."""
    try:
        return await wait_with_timeout(STORE_TIMEOUT, work)
    except SQLAlchemyError as error:
        # its own text has the values
        raise ResourceError(f"The store failed ({type(error).__name__}).") from error
    except TimeoutError as error:
        raise ResourceError(f"The store did not answer within {STORE_TIMEOUT:g} s.") from error


def write_events(connection: Connection, events: Sequence[UsageEvent]) -> WriteResult:
    """Write the events that are not there yet, with the price of their time where they have none.

    An event that no bill can take, or whose tenant, user and key do not belong together, is parked with its reason.
    """
    unpriced = {event.model for event in events if event.price_id is None}
    prices = {model: list_prices_async(connection, model) for model in sorted(unpriced)}
    priced = [_priced(event, prices) for event in events]
    records = [_record(event) for event in priced]
    owners = find_record_owners(connection, records)
    faults = [_reason_to_park(event, record, owners) for event, record in zip(priced, records, strict=True)]
    if any(faults):
        wrong = [(event, fault) for event, fault in zip(events, faults, strict=True) if fault]
        log.error(
            "%d events of usage are parked, the first of gateway %s: %s. List them with `llmops usage dead-letters`.",
            len(wrong), escape_unsafe(wrong[0][0].gateway_id), wrong[0][1],
        )  # fmt: skip
        add_dead_letters(connection, [parked_event(event, fault) for event, fault in wrong], utc_now())
        records = [record for record, fault in zip(records, faults, strict=True) if not fault]
    return write_usage(connection, records, owners)


def parked_event(event: UsageEvent, reason: str) -> DeadLetter:
    """Return the event as it is parked. It counts as arrived: its gateway does not send it again."""
    return DeadLetter(reason, f"gateway {event.gateway_id} number {event.seq}", to_cloud_event(event), event.id)


def _reason_to_park(event: UsageEvent, record: UsageRecord, owners: RecordOwners) -> str:
    """Return the reason why no bill takes the event, or an empty text."""
    if not 0 <= event.cost_micros <= MAX_COST_MICROS:
        return "cost out of range"
    if not 0 <= event.seq <= MAX_SEQUENCE:
        return "number out of range"
    tenant = owners.tenants.get(record.user_id)
    if tenant is not None and tenant != event.tenant_id:
        return "user of another tenant"
    user = owners.users.get(record.key_id or "")
    return "key of another user" if user is not None and user != record.user_id else ""


def _priced(event: UsageEvent, prices: dict[str, Sequence[Price]]) -> UsageEvent:
    if event.price_id is not None:
        return event
    price = price_in_force(prices[event.model], event.at)
    if price is None:
        return event
    used = Usage(event.input_tokens, event.output_tokens, cached_tokens=event.cached_tokens)
    return event._replace(cost_micros=micros(price, used), price_id=price.id)


_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "ttft_ms", "latency_ms")
_TEXTS = ("tenant_id", "user_id", "model", "key_id", "price_id", "version", "replica", "finish_reason", "priority")
_counts_of, _texts_of = (itemgetter(*map(UsageEvent._fields.index, names)) for names in (_COUNTS, _TEXTS))
_record_of = namedtuple_factory(UsageRecord)


def _record(event: UsageEvent) -> UsageRecord:
    """A row that the tables take, whatever the event says: one that they refused would stop all behind it."""
    counts = _counts_of(event)
    if max(filter(None, counts), default=0) > _MAX_INT32 or min(filter(None, counts), default=0) < 0:
        counts = tuple(count and max(0, min(count, _MAX_INT32)) for count in counts)
    taken, given, cached, reasoning, ttft, latency = counts
    user, model, key, price, version, replica, finish, priority = _truncated_texts(_texts_of(event))
    request = _text("request_id", event.request_id) or ""
    cost, status, moves = event.cost_micros, event.status, event.migrations
    return _record_of(
        (
            *event[:4], request, user, model, taken, given, cost, cached, reasoning, key, price, version, replica,
            status, finish, ttft, latency, priority, moves, _text("tenant_id", event.tenant_id) or "",
        )
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _truncated_texts(texts: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """What many events have in common."""
    tenant, user, *others = texts
    model, key, *rest = (_text(name, text) for name, text in zip(_TEXTS[2:], others, strict=True))
    return _user(tenant or "", user or ""), model or "", key or None, *rest


def _text(name: str, value: str | None) -> str | None:
    """As much of it as its column takes."""
    if value is None or (value.isascii() and value.isprintable() and len(value) <= _LENGTHS[name]):
        return value
    # a database without an encoding counts bytes
    return strip_unsafe(value).encode("utf-8", "replace")[: _LENGTHS[name]].decode("utf-8", "ignore")


def _user(tenant: str, user: str) -> str:
    """The store's own id of the user; for one that another system named an id that is always the same."""
    if not tenant:
        return ANONYMOUS_USER_ID
    try:
        return str(UUID(user))
    except ValueError:
        return str(uuid5(NAMESPACE_URL, f"llmops:{tenant}/{user}"))
