"""What a request costs, by the store's prices; they are kept here, so that nobody waits for them.

The only file of this room that knows what a price is in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from llmops.clocks import utc_now, wait_with_timeout
from llmops.errors import LlmopsError
from llmops.gateway.errors import ModelNotPricedError, UnavailableError
from llmops.gateway.interfaces import Usage
from llmops.store.factory import LazyStore
from llmops.store.prices import Price, list_prices, price_in_force
from llmops.store.usage_queries import spent_micros
from llmops.tuples import namedtuple_factory

log = logging.getLogger(__name__)

# seconds: between two looks at the prices; while they cannot be read; and for as long a store may take
REFRESH_INTERVAL, RETRY_INTERVAL, STORE_TIMEOUT = 30.0, 1.0, 2.0
TENANT_PREFIX = "tenant "


class Bill(NamedTuple):
    """`micros`: micro-dollars. `price_id`: the price that they come from; None where the model had none: 0 then."""

    micros: int
    price_id: str | None


_make_bill = namedtuple_factory(Bill)


class Billing:
    """Prices of all models, those to come too: each holds from its moment on, not from when this process looks again.

    A store that is away leaves the prices that are known.
    """

    def __init__(self, url: str, now: Callable[[], datetime] = utc_now) -> None:
        self._store, self._now = LazyStore(url, pool_size=1), now
        # of each model, the oldest first
        self._prices: Mapping[str, Sequence[Price]] | None = None
        self._unpriced: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._away = False

    async def start(self) -> None:
        """Read the prices, for as long as that may take at most; afterwards it goes on trying."""
        await self.look()
        self._task = asyncio.create_task(self._stay(), name="prices")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store.close()

    def bill(self, model: str, usage: Usage, at: datetime | None = None) -> Bill:
        """By the price in force at `at` (now): whole micro-dollars, rounded half up once."""
        price = self._price(model, at or self._now())
        if price is None:
            self._warn(model)
            return Bill(0, None)
        return _make_bill((micros(price, usage), price.id))

    def tariff(self, model: str) -> Callable[[int, int, int], int]:
        """Micro-dollars by the price in force now, for tokens of the prompt, those of them from a cache, and of the
        answer.

        Raises ModelNotPricedError for a model that a budget could not bound, UnavailableError while no prices are
        known.
        """
        if self._prices is None:
            raise UnavailableError("Prices cannot be looked up now; try again.", code="prices_unavailable")
        price = self._price(model, self._now())
        if price is None:
            raise ModelNotPricedError(model)
        return price.tariff

    async def spent(self, of: str, since: datetime) -> int:
        """Of a key, or of `tenant NAME`. Raises LlmopsError, SQLAlchemyError, TimeoutError when it is away."""
        tenant = of.removeprefix(TENANT_PREFIX) if of.startswith(TENANT_PREFIX) else None
        return await wait_with_timeout(STORE_TIMEOUT, self._spent(None if tenant else of, tenant, since))

    async def look(self) -> None:
        """Read the prices now."""
        try:
            found = await wait_with_timeout(STORE_TIMEOUT, self._read())
        except (TimeoutError, LlmopsError, SQLAlchemyError) as error:
            if not self._away:
                log.error("Prices cannot be read (%s); those that are known stay.", _error_text(error))
            self._away = True
            return
        if self._away:
            log.warning("Prices can be read again.")
        self._away = False
        by_model: dict[str, list[Price]] = {}
        for price in found:
            by_model.setdefault(price.model, []).append(price)
        self._prices = by_model
        self._unpriced -= set(by_model)

    async def _stay(self) -> None:
        while True:
            await asyncio.sleep(RETRY_INTERVAL if self._away else REFRESH_INTERVAL)
            await self.look()

    def _price(self, model: str, at: datetime) -> Price | None:
        known = self._prices.get(model) if self._prices else None
        return price_in_force(known, at) if known else None

    def _warn(self, model: str) -> None:
        if model not in self._unpriced and self._prices is not None:
            self._unpriced.add(model)
            log.warning("The model '%s' has no price and is billed as $0; `llmops price set` gives it one.", model)

    async def _read(self) -> Sequence[Price]:
        async with self._store.read() as connection:
            return await list_prices(connection)

    async def _spent(self, key: str | None, tenant: str | None, since: datetime) -> int:
        async with self._store.read() as connection:
            return await spent_micros(connection, since, key_id=key, tenant_id=tenant)


def micros(price: Price, usage: Usage) -> int:
    """What one request costs by `price`."""
    return price.tariff(usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)


def _error_text(error: Exception) -> str:
    """Without a driver's own text."""
    if isinstance(error, LlmopsError):
        return error.message
    return f"no answer in {STORE_TIMEOUT:g} s" if isinstance(error, asyncio.TimeoutError) else type(error).__name__
