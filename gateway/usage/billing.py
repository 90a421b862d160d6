"""The cost of requests, computed from the store's prices.

The prices are kept in memory, so that no request waits for the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from llmops.background import cancel_tasks
from llmops.clocks import utc_now
from llmops.errors import LlmopsError
from llmops.gateway.errors import ModelNotPricedError, UnavailableError
from llmops.gateway.interfaces import TENANT_PREFIX, Usage
from llmops.store.factory import LazyStore, within
from llmops.store.prices import Price, prices_by_model
from llmops.store.usage_queries import spent_micros
from llmops.untrusted_text import escape_unsafe

log = logging.getLogger(__name__)

#: Seconds between two reads of the prices, and so the delay until a new price is used.
REFRESH_INTERVAL = 30.0
#: Seconds between two reads of the prices while the store is unavailable.
RETRY_INTERVAL = 1.0
#: Seconds without a response after which the store counts as unavailable.
STORE_TIMEOUT = 2.0


class Bill(NamedTuple):
    """The cost of a request in micro-dollars and the id of its price; (0, None) without a price."""

    micros: int
    price_id: str | None


class Billing:
    """The prices of all models, including prices that take effect later.

    The last known prices stay in use while the store is unavailable.
    """

    def __init__(self, url: str, now: Callable[[], datetime] = utc_now) -> None:
        self._store, self._now = LazyStore(url, pool_size=1), now
        # The prices of each model, the oldest first; None until the first read.
        self._prices: Mapping[str, Sequence[Price]] | None = None
        # The times at which prices were read that were in force already. Requests that arrived
        # earlier reserved money by the price before.
        self._read_late: dict[Price, datetime] = {}
        self._unpriced: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._away = False
        #: Function that returns the cost of events which wait for the ledger; see
        #: `UsageCheck.undelivered`.
        self.undelivered: Callable[[str, datetime], Awaitable[int]] = _nothing

    async def start(self) -> None:
        """Read the prices for at most `STORE_TIMEOUT` seconds, and then refresh them regularly."""
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_forever(), name="prices")

    async def close(self) -> None:
        await cancel_tasks(self._task)
        await self._store.close()

    def bill(self, model: str, usage: Usage, at: datetime | None = None) -> Bill:
        """Return the cost of a request in micro-dollars, rounded half up once, and its price's id.

        Args:
            model: The name of the model.
            usage: The tokens of the request.
            at: The time whose price applies; None for now.
        """
        price = self._price(model, at or self._now())
        if price is None:
            self._warn(model)
            return Bill(0, None)
        return Bill(micros=micros(price, usage), price_id=price.id)

    def tariff(self, model: str, at: datetime | None = None) -> Callable[[int, int, int], int]:
        """Return a function that computes a cost in micro-dollars from token counts.

        The function's arguments are the prompt tokens, the cached tokens among them, and the output
        tokens. The price is the one at the time `at`; None means now.

        Raises:
            ModelNotPricedError: The model has no price, so a budget cannot bound its cost.
            UnavailableError: No prices are known yet.
        """
        if self._prices is None:
            raise UnavailableError("Prices cannot be looked up now; try again.", code="prices_unavailable")
        price = self._price(model, at or self._now())
        if price is None:
            raise ModelNotPricedError(model)
        return price.tariff

    async def spent(self, owner: str, since: datetime) -> int:
        """Return the money spent by an owner since a time, in micro-dollars.

        The events that dead gateways left in outboxes count too.

        Args:
            owner: A key id, or `tenant ID` for a tenant.
            since: The start of the period.

        Raises:
            LlmopsError: The store is unavailable.
        """
        tenant = owner.removeprefix(TENANT_PREFIX) if owner.startswith(TENANT_PREFIX) else None
        query = partial(spent_micros, since=since, key_id=None if tenant else owner, tenant_id=tenant)
        spent = await within(STORE_TIMEOUT, self._store.ask(query))
        return spent + await self.undelivered(owner, since)

    async def refresh(self) -> None:
        """Read the prices from the store, and keep the last known prices on failure."""
        try:
            found, damaged = await within(STORE_TIMEOUT, self._store.ask(prices_by_model))
            reason = f"a value of {', '.join(map(escape_unsafe, damaged[:5]))} is damaged" if damaged else ""
        except LlmopsError as error:
            found, damaged, reason = None, [], error.message
        if reason and not self._away:
            log.error("Prices cannot be read (%s). The gateway uses the last known prices and retries.", reason)
        elif self._away and not reason:
            log.warning("Prices can be read again.")
        self._away = bool(reason)
        if found is not None:
            if self._prices is not None:
                now = self._now()
                late = {one for known in found.values() for one in known if one.valid_from <= now}
                late -= {one for known in self._prices.values() for one in known}
                self._read_late.update(dict.fromkeys(late, now))
            self._prices = {model: known for model, known in (self._prices or {}).items() if model in damaged} | found
            self._unpriced -= set(self._prices)

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(RETRY_INTERVAL if self._away else REFRESH_INTERVAL)
            await self.refresh()

    def _price(self, model: str, at: datetime) -> Price | None:
        """Return the latest price in force and read at `at`, else the latest in force, or None."""
        first = None
        for price in reversed((self._prices or {}).get(model, ())):
            if price.valid_from <= at:
                if self._read_late.get(price, at) <= at:
                    return price
                first = first or price
        return first

    def _warn(self, model: str) -> None:
        if model not in self._unpriced and self._prices is not None:
            self._unpriced.add(model)
            log.warning("The model '%s' has no price and is billed as $0; `llmops price set` gives it one.", model)


async def _nothing(owner: str, since: datetime) -> int:
    return 0


def micros(price: Price, usage: Usage) -> int:
    """Return the cost of one request by this price, in micro-dollars."""
    return price.tariff(usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)
