"""Tests of the spending that control exports to Prometheus.

It has the ledger's own sums, and a bounded number of series.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmops.control.metrics import CACHE_SECONDS, MAX_SERIES, OTHERS_LABEL, SpendingCollector
from llmops.control.store_access import SharedStore
from llmops.gateway.errors import UnavailableError
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.accounts.tenants import update_tenant
from llmops.store.factory import open_store
from llmops.store.usage_writes import UsageRecord, insert_usage
from tests.store.control_client import BY, bearer, control, make_key

NOW = datetime(2026, 9, 10, 12, tzinfo=UTC)


def record(number: int, user: str, cost: int, day: int = 3, model: str = "tiny") -> UsageRecord:
    at = NOW.replace(day=1) + timedelta(days=day)
    return UsageRecord(str(UUID(int=number + 1)), "g1", number, at, f"r{number}", user, model, 100, 20, cost, 60)


async def insert(url: str, *records: UsageRecord) -> None:
    async with await open_store(url) as store, store.write() as connection:
        await insert_usage(connection, records)


def told(spending: SpendingCollector) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in spending.collect()
    }


async def test_it_is_the_month_of_the_ledger(url):
    _, _, acme = await make_key(url, "acme")
    _, _, zeta = await make_key(url, "zeta")
    await insert(
        url, record(0, acme, 1_500_000), record(1, acme, 250_000, model="big"), record(2, zeta, 4_000_000, model="big"),
        # last month's
        record(3, zeta, 9_000_000, day=-3),
    )  # fmt: skip
    async with await open_store(url) as store, store.write() as connection:
        await update_tenant(connection, "acme", Limits(budget=Budget(7_000_000, "month")), BY)
        await update_tenant(connection, "zeta", Limits(budget=Budget(1_000_000, "day")), BY)
    store = SharedStore(url)
    spending = SpendingCollector(store, lambda: NOW)
    await spending.refresh()
    await store.close()
    found = told(spending)
    assert found["llmops_spent_dollars"] == {("acme",): 1.75, ("zeta",): 4.0}
    assert found["llmops_model_spent_dollars"] == {("tiny",): 1.5, ("big",): 4.25}
    assert found["llmops_spent_tokens"] == {
        ("acme", "input"): 80, ("acme", "cached"): 120, ("acme", "output"): 40,
        ("zeta", "input"): 40, ("zeta", "cached"): 60, ("zeta", "output"): 20,
    }  # fmt: skip
    # zeta's day is another one than that of its usage
    assert found["llmops_budget_used_ratio"] == {("acme",): 0.25, ("zeta",): 0.0}


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_tenants_that_spend_little_share_a_series(url, kind):
    spent = {}
    for number in range(MAX_SERIES + 5):
        _, _, user = await make_key(url, f"t{number:02}")
        spent[f"t{number:02}"] = number + 1.0
        await insert(url, record(number, user, (number + 1) * 10**6))
    store = SharedStore(url)
    spending = SpendingCollector(store, lambda: NOW)
    await spending.refresh()
    await store.close()
    found = {tenant: value for (tenant,), value in told(spending)["llmops_spent_dollars"].items()}
    assert len(found) == MAX_SERIES + 1
    assert found.pop(OTHERS_LABEL) == 1 + 2 + 3 + 4 + 5
    assert found == {name: value for name, value in spent.items() if value > 5}


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_the_store_is_asked_once_a_minute_and_may_be_away(url, kind, caplog):
    _, _, user = await make_key(url, "acme")
    await insert(url, record(0, user, 10**6))
    seconds, away = [0.0], [False]

    class Store(SharedStore):
        def read(self):
            if away[0]:
                raise UnavailableError("The store cannot be asked now; try again.")
            return super().read()

    store = Store(url)
    spending = SpendingCollector(store, lambda: NOW, lambda: seconds[0])

    async def after(more: float) -> float:
        seconds[0] += more
        await spending.refresh()
        return told(spending)["llmops_spent_dollars"]["acme",]

    assert await after(0) == 1.0
    await insert(url, record(1, user, 10**6))
    assert await after(CACHE_SECONDS - 1) == 1.0
    assert await after(1) == 2.0
    away[0] = True
    assert await after(CACHE_SECONDS) == 2.0
    assert "cannot be read for Prometheus: The store cannot be asked now" in caplog.text
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_prometheus_finds_it_at_control(url, kind):
    secret, _, user = await make_key(url, "acme", scopes=("metrics",))
    today = record(0, user, 10**6)
    await insert(url, today._replace(created_at=datetime.now(UTC)))
    async with control(url) as client:
        page = (await client.get("/metrics", headers=bearer(secret))).text
        assert (await client.get("/metrics")).status_code == 401
    (family,) = [one for one in text_string_to_metric_families(page) if one.name == "llmops_spent_dollars"]
    assert [(one.labels, one.value) for one in family.samples] == [({"tenant": "acme"}, 1.0)]
