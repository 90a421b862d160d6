"""A sink that writes events to the ledger's tables in the store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from uuid import NAMESPACE_URL, UUID, uuid5

from sqlalchemy import Connection

from llmops.clocks import utc_now
from llmops.gateway.interfaces import Usage, UsageEvent
from llmops.gateway.logging_setup import RepeatedLines, request_logger
from llmops.gateway.usage.billing import micros
from llmops.gateway.usage.event_formats import MAX_COST_MICROS, to_cloud_event
from llmops.gateway.usage.sink import UsageSink
from llmops.store import usage_writes
from llmops.store.columns import DAMAGED, canonical_uuid, store_time
from llmops.store.dead_letters import DeadLetter, add_dead_letters
from llmops.store.factory import LazyStore, within
from llmops.store.prices import Price, price_in_force, read_prices
from llmops.store.store_url import StoreUrl
from llmops.store.tables import tenant_totals, usage_records
from llmops.store.usage_queries import high_water_mark, known_events
from llmops.store.usage_writes import (
    MAX_SEQUENCE,
    RecordOwners,
    UsageRecord,
    WriteResult,
    find_record_owners,
    write_usage,
)
from llmops.untrusted_text import escape_unsafe, strip_unsafe

log = logging.getLogger(__name__)
# Anyone who can write to the topic can make the numbers of events jump.
request_logger(usage_writes.jump_log.name)

#: The user of all requests without a key. They share one user, because clients could otherwise
#: create any number of rows.
ANONYMOUS_USER_ID = str(UUID(int=0))
#: Seconds without a response after which the store counts as unavailable.
STORE_TIMEOUT = 30.0
#: Largest difference of the clocks of a gateway and of the store that is not corrected.
MAX_CLOCK_LEAD = timedelta(minutes=1)
_LINES = RepeatedLines(60.0)
_LENGTHS = {column.name: getattr(column.type, "length", None) or 0 for column in usage_records.columns}
_LENGTHS |= {"tenant_id": getattr(tenant_totals.c.tenant_id.type, "length", None) or 0}
_TEXTS = ("request_id", "tenant_id", "key_id", "model", "price_id", "version", "replica", "finish_reason", "priority")
_COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "ttft_ms", "latency_ms")
_MAX_INT32 = 2**31 - 1


def place_of(store: str) -> str:
    """Return a text that names the store's database, whatever the spelling of its URL."""
    return StoreUrl.parse(store).place


class LedgerSink(UsageSink):
    """A sink that writes to the ledger in the store at `url`. Each batch is one transaction."""

    def __init__(self, url: str) -> None:
        self._store = LazyStore(url, pool_size=2)

    async def write(self, events: Sequence[UsageEvent]) -> None:
        await within(STORE_TIMEOUT, self._store.transact(partial(write_events, events=events)))

    async def confirmed(self, ids: Sequence[str]) -> frozenset[str]:
        return await within(STORE_TIMEOUT, self._store.ask(partial(known_events, ids=ids)))

    async def next_number(self, gateway_id: str) -> int:
        return await within(STORE_TIMEOUT, self._store.ask(partial(high_water_mark, gateway_id=gateway_id)))

    async def close(self) -> None:
        await self._store.close()


def write_events(connection: Connection, events: Sequence[UsageEvent]) -> WriteResult:
    """Write the events that the ledger does not have yet.

    An event without a price gets the price in force at the start of the request. An event is parked
    with a reason if it cannot be billed, or if its tenant, user and key do not belong together. A
    time in the future becomes now, because it would count in the budgets of all months until then.
    """
    now = store_time(connection)
    ahead = [event for event in events if event.at > now + MAX_CLOCK_LEAD]
    if ahead and (suffix := _LINES.suffix("clock")) is not None:
        log.error(
            "The clock of gateway %s is %s ahead; its usage is billed as of now. Correct the clock.%s",
            escape_unsafe(ahead[0].gateway_id), ahead[0].at - now, suffix,
        )  # fmt: skip
    events = [event._replace(at=now) if event.at > now + MAX_CLOCK_LEAD else event for event in events]
    unpriced = {event.model for event in events if event.price_id is None}
    prices = {model: _prices_of(connection, model) for model in sorted(unpriced)}
    priced = [_priced(event, prices) for event in events]
    records = [_record(event) for event in priced]
    owners = find_record_owners(connection, records)
    damaged = {model for model, known in prices.items() if known is None}
    faults = [
        "damaged price" if event.price_id is None and event.model in damaged else _reason_to_park(event, record, owners)
        for event, record in zip(priced, records, strict=True)
    ]
    if any(faults):
        wrong = [(event, fault) for event, fault in zip(events, faults, strict=True) if fault]
        log.error(
            "%d usage events cannot be billed and are parked; the first is from gateway %s: %s. List them with "
            "`llmops usage dead-letters`.",
            len(wrong), escape_unsafe(wrong[0][0].gateway_id), wrong[0][1],
        )  # fmt: skip
        add_dead_letters(connection, [parked_event(event, fault) for event, fault in wrong], utc_now())
        records = [record for record, fault in zip(records, faults, strict=True) if not fault]
    return write_usage(connection, records, owners)


def parked_event(event: UsageEvent, reason: str) -> DeadLetter:
    """Return the event as a dead letter with the `reason` why it cannot be billed.

    The ledger confirms a parked event, so the event's gateway does not send it again.
    """
    return DeadLetter(reason, f"gateway {event.gateway_id} number {event.seq}", to_cloud_event(event), event.id)


def _reason_to_park(event: UsageEvent, record: UsageRecord, owners: RecordOwners) -> str:
    """Return the reason why the event cannot be billed, or an empty text if it can."""
    if not 0 <= event.cost_micros <= MAX_COST_MICROS:
        return "cost out of range"
    if not 0 <= event.seq <= MAX_SEQUENCE:
        return "number out of range"
    tenant = owners.tenants.get(record.user_id)
    if tenant is not None and tenant != event.tenant_id:
        return "user of another tenant"
    user = owners.users.get(record.key_id or "")
    return "key of another user" if user is not None and user != record.user_id else ""


def _prices_of(connection: Connection, model: str) -> Sequence[Price] | None:
    """Return the prices of a model, or None if a price is damaged.

    A damaged price affects only its own model; other models are billed.
    """
    try:
        return read_prices(connection, _text("model", model) or "")
    except DAMAGED:
        return None


def _priced(event: UsageEvent, prices: dict[str, Sequence[Price] | None]) -> UsageEvent:
    if event.price_id is not None:
        return event
    started = event.at - timedelta(milliseconds=_count(event.latency_ms) or 0)
    price = price_in_force(prices[event.model] or (), started)
    if price is None:
        return event
    used = Usage(event.input_tokens, event.output_tokens, cached_tokens=event.cached_tokens)
    return event._replace(cost_micros=micros(price, used), price_id=price.id)


def _record(event: UsageEvent) -> UsageRecord:
    """Return a row that the tables accept, whatever values the event has.

    A row that the tables refuse would block all events behind it.
    """
    values = event._asdict()
    created_at = values.pop("at")
    values |= {name: _text(name, values[name]) for name in _TEXTS} | {name: _count(values[name]) for name in _COUNTS}
    values |= {"user_id": _store_user_id(event.tenant_id, event.user_id), "key_id": values["key_id"] or None}
    return UsageRecord(created_at=created_at, **values)


def _count(value: int | None) -> int | None:
    return value if value is None else max(0, min(value, _MAX_INT32))


def _text(name: str, value: str | None) -> str | None:
    """Return the longest beginning of `value` that fits into the column `name`; None stays None."""
    if value is None or (value.isascii() and value.isprintable() and len(value) <= _LENGTHS[name]):
        return value
    # Count bytes and not characters, because a database without an encoding limits bytes.
    return strip_unsafe(value).encode("utf-8", "replace")[: _LENGTHS[name]].decode("utf-8", "ignore")


def _store_user_id(tenant: str, user: str) -> str:
    """Return the id of a user in the store.

    A name from another system becomes a UUID that is derived from the name, so it is always the
    same.
    """
    if not tenant:
        return ANONYMOUS_USER_ID
    try:
        return canonical_uuid(user)
    except ValueError:
        return str(uuid5(NAMESPACE_URL, f"llmops:{tenant}/{user}"))
