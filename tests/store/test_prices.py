"""Tests of what tokens cost, compared with figures computed by hand, on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import InputError
from llmops.store.audit import list_audit_entries
from llmops.store.prices import Price, list_prices, price_in_force, prices_at, set_price

tokens = st.integers(0, 2**31 - 1)
micros = st.integers(0, 10**12)


def price(by, model="smollm2", days=0.0, into=600_000, cached=300_000, out=900_000):
    return Price(model, by.at + timedelta(days=days), into, cached, out)


@pytest.mark.parametrize(
    ("counts", "cost"),
    # $0.60, $0.30 and $0.90 per million, by hand: 37 prompt tokens of which 32 were cached, 7 of answer:
    # 5 x 0.6 + 32 x 0.3 + 7 x 0.9 = 3 + 9.6 + 6.3 = 18.9 micro-dollars
    [((37, 32, 7), 19), ((0, 0, 0), 0), ((1_000_000, 0, 0), 600_000), ((0, 0, 1), 1), ((1, 1, 0), 0), ((5, 5, 0), 2)],
)
def test_cost_by_hand(by, counts, cost):
    assert price(by).cost_micros(*counts) == cost


@given(uncached=tokens, cached=tokens, out=tokens, into=micros, kept=micros, made=micros)
def test_cost_is_the_exact_sum_rounded_half_up_once(uncached, cached, out, into, kept, made, by):
    exact = Fraction(uncached * into, 10**6) + Fraction(cached * kept, 10**6) + Fraction(out * made, 10**6)
    cost = price(by, into=into, cached=kept, out=made).cost_micros(uncached + cached, cached, out)
    assert isinstance(cost, int)
    assert Fraction(-1, 2) <= exact - cost < Fraction(1, 2)


@pytest.mark.parametrize("counts", [(5, 6, 0), (5, -1, 0), (0, 0, -1), (-1, 0, 0)])
def test_counts_that_cannot_be_are_not_billed(by, counts):
    with pytest.raises(ValueError, match="tokens"):
        price(by).cost_micros(*counts)


async def test_a_price_holds_from_its_date_until_the_next(store, by):
    first, second, other = price(by), price(by, days=10, into=1), price(by, "llama", days=1)
    async with store.write() as connection:
        for one in (second, first, other):
            await set_price(connection, one, by)
        moment = timedelta(microseconds=1)
        assert price_in_force(await list_prices(connection, "smollm2"), by.at - moment) is None
        assert price_in_force(await list_prices(connection, "smollm2"), by.at) == first
        assert price_in_force(await list_prices(connection, "smollm2"), second.valid_from - moment) == first
        assert price_in_force(await list_prices(connection, "smollm2"), second.valid_from) == second
        assert price_in_force(await list_prices(connection, "unknown"), by.at) is None
        assert await prices_at(connection, by.at) == {"smollm2": first}
        assert await prices_at(connection, by.at + timedelta(days=30)) == {"smollm2": second, "llama": other}
        assert await list_prices(connection) == [other, first, second]
        assert await list_prices(connection, "smollm2") == [first, second]


async def test_a_price_to_come_can_be_changed_and_one_in_force_cannot(store, by):
    coming = price(by, days=1)
    async with store.write() as connection:
        await set_price(connection, coming, by)
        cheaper = replace(coming, output_micros=1)
        await set_price(connection, cheaper, by)
        assert await list_prices(connection) == [cheaper]
        with pytest.raises(InputError, match="cannot begin in the past"):
            await set_price(connection, coming, replace(by, at=coming.valid_from + timedelta(seconds=1)))
        logged = await list_audit_entries(connection)
    assert [entry.subject for entry in logged] == ["smollm2@2026-11-23T13:30:00Z"] * 2
    assert {entry.detail["output_micros"] for entry in logged} == {1, 900_000}


@pytest.mark.parametrize("wrong", [{"into": -1}, {"cached": 10**12 + 1}, {"model": ""}, {"model": "m" * 256}])
def test_prices_that_cannot_be(by, wrong):
    with pytest.raises(InputError):
        price(by, **wrong)
